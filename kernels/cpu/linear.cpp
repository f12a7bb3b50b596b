// x @ weight.T + bias over packed weights: few tokens, which are a stream of the weights. linear_many.cpp does many.
#include "linear_common.h"

namespace headrace::HEADRACE_TIER {

size_t linear_many_scratch(const LinearArgs &);
void linear_many(const LinearArgs &, const Context &);

namespace {

// Each panel is read from memory for the first token and from the cache for the others. Scratch: words of x.

template <class Reader, class T>
void few_tokens(const LinearArgs &args, const Context &context) {
    const Weight &weight = args.weight;
    const int64_t num_words = weight.padded_cols / Reader::kColumns;
    auto *words = reinterpret_cast<uint32_t *>(context.scratch);
    int64_t begin, end;
    share((weight.rows + kPanel - 1) / kPanel, context, &begin, &end);
    if (begin == end) return;
    float scales[kFewTokens];
    for (int64_t token = 0; token < args.num_tokens; ++token)
        read_x<Reader>(row_of_x<T>(args, token), weight.cols, num_words, words + token * num_words, scales + token);
    for (int64_t panel = begin; panel < end; ++panel)
        for (int64_t token = 0; token < args.num_tokens; ++token) {
            Reader reader(weight, weight.data + panel * weight.panel_bytes);
            const uint32_t *x = words + token * num_words;
            typename Reader::Acc acc[kChains][kVecs] = {};
            for (int64_t j = 0; j < num_words; j += kChains) {
                typename Reader::Word w[kChains][kVecs];
                reader.next(w);
                for (int c = 0; c < kChains; ++c)
                    for (int v = 0; v < kVecs; ++v) acc[c][v] = Reader::mac(acc[c][v], w[c][v], x[j + c]);
            }
            for (int v = 0; v < kVecs; ++v) {
                const int64_t row = panel * kPanel + v * kLanes;
                if (row >= weight.rows) continue;
                const typename Reader::Acc total = (acc[0][v] + acc[1][v]) + (acc[2][v] + acc[3][v]);
                put<T>(args, token, row, finish(weight, total, row, scales[token]));
            }
        }
}

struct Path {
    template <class Reader, class T>
    static void run(const LinearArgs &args, const Context &context) {
        if (args.num_tokens <= (Reader::kIsCheap ? kFewTokens : 1))
            few_tokens<Reader, T>(args, context);
        else
            linear_many(args, context);
    }
};

}  // namespace

size_t linear_scratch(const LinearArgs &args) {
    const size_t few = static_cast<size_t>(kFewTokens * args.weight.padded_cols) * 4, many = linear_many_scratch(args);
    return few > many ? few : many;
}

void linear(const LinearArgs &args, const Context &context) { run_path<Path>(args, context); }

}  // namespace headrace::HEADRACE_TIER
