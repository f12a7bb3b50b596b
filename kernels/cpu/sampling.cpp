#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "thread_pool.h"

namespace headrace {
namespace {

constexpr float kGreedyBelow = 1e-5f;
// No noise is larger: -log(-log1p(-v)) at the smallest v, 0.5 / 2^32.
constexpr float kMaxNoise = 22.9f;

// Wellons 2018.
std::uint32_t mix(std::uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

std::uint32_t noise_key(std::uint32_t seed, std::uint32_t position) { return mix(mix(seed) ^ position); }

float uniform(std::uint32_t key, std::uint32_t token) {
    const std::uint32_t h = mix(key + 0x9E3779B9u * (token + 1));
    const auto v = static_cast<float>((static_cast<double>(h) + 0.5) / 4294967296.0);
    return std::min(v, 1 - 0x1p-24f);
}

float noise(float v) { return -std::log(-std::log1p(-v)); }

struct Candidate {
    float value;
    std::int32_t token;
};

bool before(const Candidate &a, const Candidate &b) {
    return a.value != b.value ? a.value > b.value : a.token < b.token;
}

// The first of the highest; NaNs are passed over, but for one at the start, which is never beaten.
std::int32_t argmax(const float *logits, std::int64_t n) {
    // The highest of a block takes no branch, so vectors do it; then one block is searched for the place.
    constexpr std::int64_t kBlock = 1024, kLanes = 16;
    std::int64_t best = 0;
    for (std::int64_t start = 0; start < n; start += kBlock) {
        const std::int64_t end = std::min(n, start + kBlock);
        float lanes[kLanes];
        std::fill(lanes, lanes + kLanes, logits[best]);
        std::int64_t i = start;
        for (; i + kLanes <= end; i += kLanes)
            for (std::int64_t j = 0; j < kLanes; ++j) lanes[j] = logits[i + j] > lanes[j] ? logits[i + j] : lanes[j];
        float highest = logits[best];
        for (const float lane : lanes) highest = lane > highest ? lane : highest;
        for (; i < end; ++i) highest = logits[i] > highest ? logits[i] : highest;
        if (highest > logits[best])
            for (best = start; logits[best] != highest;) ++best;
    }
    return static_cast<std::int32_t>(best);
}

// Keep the k highest and what equals the k-th.
void keep_top_k(std::vector<Candidate> &kept, std::size_t k) {
    if (k >= kept.size()) return;
    const auto kth = kept.begin() + static_cast<std::ptrdiff_t>(k) - 1;
    std::nth_element(kept.begin(), kth, kept.end(), before);
    const float floor = kth->value;
    std::erase_if(kept, [floor](const Candidate &c) { return c.value < floor; });
}

// Keep each token whose betters hold less than top_p of the probability. Sorts only as far as needed.
void keep_top_p(std::vector<Candidate> &kept, float top_p) {
    const float highest = std::max_element(kept.begin(), kept.end(), [](const Candidate &a, const Candidate &b) {
                              return a.value < b.value;
                          })->value;
    double total = 0;
    for (const Candidate &c : kept) total += std::exp(static_cast<double>(c.value - highest));
    double above = 0;
    std::size_t sorted = 0, count = 0;
    while (count < kept.size()) {
        if (count == sorted) {
            const std::size_t goal = std::min(kept.size(), std::max<std::size_t>(64, sorted * 8));
            std::partial_sort(kept.begin() + static_cast<std::ptrdiff_t>(sorted),
                              kept.begin() + static_cast<std::ptrdiff_t>(goal), kept.end(), before);
            sorted = goal;
        }
        if (count > 0 && above >= static_cast<double>(top_p)) break;
        above += std::exp(static_cast<double>(kept[count].value - highest)) / total;
        ++count;
    }
    kept.resize(count);
}

class Best {
  public:
    explicit Best(std::uint32_t key) : key_(key) {}

    // Tokens may come in any order: of equal sums the lowest id wins.
    void offer(float value, std::int32_t token) {
        if (value + kMaxNoise < best_) return;
        const float v = uniform(key_, static_cast<std::uint32_t>(token));
        // noise(v) < -log(v), so most candidates need no exact noise; 1e-3 covers the roundings.
        if (value - std::log(v) + 1e-3f < best_) return;
        const float sum = value + noise(v);
        if (sum > best_ || (sum == best_ && token < token_)) {
            best_ = sum;
            token_ = token;
        }
    }

    std::int32_t token() const { return token_; }

  private:
    std::uint32_t key_;
    float best_ = -std::numeric_limits<float>::infinity();
    std::int32_t token_ = std::numeric_limits<std::int32_t>::max();
};

std::int32_t sample_row(const SampleArgs &args, std::int64_t row) {
    const std::int64_t n = args.vocab_size;
    const float *logits = args.logits + row * n;
    const std::int32_t greedy = argmax(logits, n);
    if (args.temperature == nullptr || args.temperature[row] < kGreedyBelow) return greedy;
    const float temperature = args.temperature[row];
    float floor = -std::numeric_limits<float>::infinity();
    if (args.min_p != nullptr && args.min_p[row] > 0)
        floor = logits[greedy] / temperature + std::log(args.min_p[row]);
    const bool has_k = args.top_k != nullptr && args.top_k[row] > 0;
    const bool has_p = args.top_p != nullptr && args.top_p[row] < 1;
    Best best(noise_key(static_cast<std::uint32_t>(args.seeds[row]), static_cast<std::uint32_t>(args.positions[row])));
    if (!has_k && !has_p) {
        // The likeliest token first: then most others cannot win.
        best.offer(logits[greedy] / temperature, greedy);
        for (std::int64_t i = 0; i < n; ++i) {
            const float value = logits[i] / temperature;
            if (value >= floor) best.offer(value, static_cast<std::int32_t>(i));
        }
        return best.token() < n ? best.token() : greedy;
    }
    thread_local std::vector<Candidate> kept;
    kept.clear();
    for (std::int64_t i = 0; i < n; ++i) {
        const float value = logits[i] / temperature;
        if (value >= floor && value > -std::numeric_limits<float>::infinity())
            kept.push_back({value, static_cast<std::int32_t>(i)});
    }
    if (has_k) keep_top_k(kept, static_cast<std::size_t>(args.top_k[row]));
    if (has_p && !kept.empty()) keep_top_p(kept, args.top_p[row]);
    for (const Candidate &c : kept) best.offer(c.value, c.token);
    return best.token() < n ? best.token() : greedy;
}

}  // namespace

float gumbel_noise(std::uint32_t seed, std::uint32_t position, std::uint32_t token) {
    return noise(uniform(noise_key(seed, position), token));
}

void sample(const SampleArgs &args) {
    parallel(0, [&](const Context &context) {
        std::int64_t begin, end;
        share(args.num_rows, context, &begin, &end);
        for (std::int64_t row = begin; row < end; ++row) args.out[row] = sample_row(args, row);
    });
}

}  // namespace headrace
