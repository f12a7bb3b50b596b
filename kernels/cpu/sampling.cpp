#include "sampling.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
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

std::uint32_t hash(std::uint32_t key, std::uint32_t token) { return mix(key + 0x9E3779B9u * (token + 1)); }

float uniform(std::uint32_t h) {
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

// The highest value of each 64, falling: at least k values reach the k-th of them.
template <class Value>
std::vector<float> block_maxima(std::size_t n, const Value &value) {
    constexpr std::size_t kBlock = 64;
    std::vector<float> maxima;
    maxima.reserve(n / kBlock + 1);
    for (std::size_t start = 0; start < n; start += kBlock) {
        float highest = -std::numeric_limits<float>::infinity();  // NaNs are passed over
        for (std::size_t i = start; i < std::min(n, start + kBlock); ++i)
            highest = value(i) > highest ? value(i) : highest;
        maxima.push_back(highest);
    }
    std::sort(maxima.begin(), maxima.end(), std::greater<>());
    return maxima;
}

// Keep the k highest and what equals the k-th.
void keep_top_k(std::vector<Candidate> &kept, std::size_t k) {
    if (k >= kept.size()) return;
    const auto kth = kept.begin() + static_cast<std::ptrdiff_t>(k) - 1;
    std::nth_element(kept.begin(), kth, kept.end(), before);
    const float floor = kth->value;
    std::erase_if(kept, [floor](const Candidate &c) { return c.value < floor; });
}

// Sum of e^(value - highest). Relative error of a term below 1e-6; without branches, so that vectors do it.
double sum_of_exp(const std::vector<Candidate> &kept, float highest) {
    constexpr std::size_t kBlock = 256;
    double total = 0;
    float terms[kBlock];
    for (std::size_t start = 0; start < kept.size(); start += kBlock) {
        const std::size_t count = std::min(kBlock, kept.size() - start);
        for (std::size_t i = 0; i < count; ++i) {
            const float log2 = (kept[start + i].value - highest) * 0x1.715476p+0f;
            const float x = log2 > -126.0f ? log2 : -126.0f;
            const float whole = (x + 0x1.8p23f) - 0x1.8p23f, f = x - whole;  // |f| <= 1/2
            float p = 0x1.430912p-13f;
            p = p * f + 0x1.5d87fep-10f;
            p = p * f + 0x1.3b2ab6p-7f;
            p = p * f + 0x1.c6b08ep-5f;
            p = p * f + 0x1.ebfbdep-3f;
            p = p * f + 0x1.62e430p-1f;
            p = p * f + 1.0f;
            terms[i] = p * std::bit_cast<float>((static_cast<std::int32_t>(whole) + 127) << 23);
        }
        float sums[8] = {};
        std::size_t i = 0;
        for (; i + 8 <= count; i += 8)
            for (std::size_t j = 0; j < 8; ++j) sums[j] += terms[i + j];
        for (; i < count; ++i) sums[0] += terms[i];
        for (const float sum : sums) total += static_cast<double>(sum);
    }
    return total;
}

// Keep each token whose betters hold less than top_p of the probability. Sorts only as far as needed.
void keep_top_p(std::vector<Candidate> &kept, float top_p) {
    const float highest = std::max_element(kept.begin(), kept.end(), [](const Candidate &a, const Candidate &b) {
                              return a.value < b.value;
                          })->value;
    const double total = sum_of_exp(kept, highest);
    const std::vector<float> maxima = block_maxima(kept.size(), [&](std::size_t i) { return kept[i].value; });
    double above = 0;
    std::size_t sorted = 0, count = 0;
    while (count < kept.size()) {
        if (count == sorted) {
            const std::size_t goal = std::min(kept.size(), std::max<std::size_t>(64, sorted * 8));
            const auto begin = kept.begin() + static_cast<std::ptrdiff_t>(sorted);
            auto end = kept.begin() + static_cast<std::ptrdiff_t>(goal);
            if (goal <= maxima.size()) {
                const float floor = maxima[goal - 1];
                end = std::partition(begin, kept.end(), [floor](const Candidate &c) { return c.value >= floor; });
            } else if (end != kept.end()) {
                std::nth_element(begin, end, kept.end(), before);
            }
            std::sort(begin, end, before);
            sorted = static_cast<std::size_t>(end - kept.begin());
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
        // noise(v) < -log(v), and the bits of h bound that: most candidates need no logarithm. 1e-3 covers roundings.
        const std::uint32_t h = hash(key_, static_cast<std::uint32_t>(token));
        if (value + static_cast<float>(33 - std::bit_width(h)) * 0.6931472f + 1e-3f < best_) return;
        const float v = uniform(h);
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
    if (has_k) {
        const auto maxima = block_maxima(static_cast<std::size_t>(n), [&](std::size_t i) { return logits[i]; });
        const auto k = static_cast<std::size_t>(args.top_k[row]);
        if (k <= maxima.size()) floor = std::max(floor, maxima[k - 1] / temperature);
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
    return noise(uniform(hash(noise_key(seed, position), token)));
}

void sample(const SampleArgs &args) {
    parallel(0, [&](const Context &context) {
        std::int64_t begin, end;
        share(args.num_rows, context, &begin, &end);
        for (std::int64_t row = begin; row < end; ++row) args.out[row] = sample_row(args, row);
    });
}

}  // namespace headrace
