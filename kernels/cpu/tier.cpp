// The table of one tier's kernels.
#include "kernels.h"

namespace headrace::HEADRACE_TIER {

size_t linear_scratch(const LinearArgs &);
void linear(const LinearArgs &, const Context &);
size_t linear_blocks_scratch(const LinearArgs &);
void linear_blocks(const LinearArgs &, const Context &);
void quantize(const QuantizeArgs &, const Context &);
void rms_norm(const NormArgs &, const Context &);
void layer_norm(const NormArgs &, const Context &);
void magnitude(const MagnitudeArgs &, const Context &);
void rope(const RopeArgs &, const Context &);
void act(const ActArgs &, const Context &);
void elementwise(const ElementwiseArgs &, const Context &);
void write_kv(const WriteKVArgs &, const Context &);
size_t attention_scratch(const AttentionArgs &);
void attention(const AttentionArgs &, const Context &);
void mean_rows(const MeanRowsArgs &, const Context &);
size_t route_scratch(const RouteArgs &);
void route(const RouteArgs &, const Context &);
void combine(const CombineArgs &, const Context &);
void modulate(const ModulateArgs &, const Context &);
void conv(const ConvArgs &, const Context &);
size_t scan_scratch(const ScanArgs &);
void scan(const ScanArgs &, const Context &);
size_t delta_scratch(const DeltaArgs &);
void delta(const DeltaArgs &, const Context &);
void wkv(const WkvArgs &, const Context &);
void lru(const LruArgs &, const Context &);

const Kernels *table() {
    static const Kernels kernels = {
        linear_scratch, linear, linear_blocks_scratch, linear_blocks, quantize, rms_norm, layer_norm, magnitude,
        rope,           act,    elementwise,           write_kv,      attention_scratch, attention,
        mean_rows,      route_scratch, route,            combine,
        modulate,       conv,          scan_scratch,     scan,     delta_scratch,     delta,
        wkv,            lru,
    };
    return &kernels;
}

}  // namespace headrace::HEADRACE_TIER
