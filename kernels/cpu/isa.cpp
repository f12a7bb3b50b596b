#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#ifdef __x86_64__
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif

namespace headrace {

// CMakeLists.txt defines HEADRACE_TIER_<name> for each tier that is built.
namespace scalar {
const Kernels *table();
}
namespace avx2 {
const Kernels *table();
}
namespace avx512 {
const Kernels *table();
}
namespace avx512_vnni {
const Kernels *table();
}
namespace avx512_bf16 {
const Kernels *table();
}
namespace avx512_amx {
const Kernels *table();
}
namespace neon_dot {
const Kernels *table();
}
namespace neon_bf16 {
const Kernels *table();
}
namespace sve256 {
const Kernels *table();
}
namespace emulated_avx512 {
const Kernels *table();
}
namespace emulated_avx512_vnni {
const Kernels *table();
}
namespace emulated_avx512_bf16 {
const Kernels *table();
}
namespace emulated_amx {
const Kernels *table();
}

namespace {

bool always() { return true; }
[[maybe_unused]] bool never() { return false; }

#ifdef __x86_64__
struct Cpuid {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Cpuid cpuid(unsigned leaf, unsigned subleaf) {
    Cpuid r;
    // __get_cpuid_count checks the highest leaf and leaves zeros if there is no such leaf.
    __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
    return r;
}

bool bit(unsigned word, int index) { return (word >> index) & 1u; }

// The operating system saves these register files (XCR0): without it the instructions fault.
bool os_saves(unsigned long long mask) {
    if (!bit(cpuid(1, 0).ecx, 27)) return false;  // OSXSAVE
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((static_cast<unsigned long long>(high) << 32 | low) & mask) == mask;
}

[[maybe_unused]] bool has_avx2() {
    const Cpuid one = cpuid(1, 0), seven = cpuid(7, 0);
    return os_saves(0x6) && bit(one.ecx, 28) && bit(one.ecx, 12) && bit(one.ecx, 29) && bit(seven.ebx, 5) &&
           bit(seven.ebx, 3) && bit(seven.ebx, 8);  // AVX, FMA, F16C, AVX2, BMI1, BMI2
}

[[maybe_unused]] bool has_avx512() {
    const Cpuid seven = cpuid(7, 0);
    return has_avx2() && os_saves(0xE6) && bit(seven.ebx, 16) && bit(seven.ebx, 17) && bit(seven.ebx, 30) &&
           bit(seven.ebx, 31);  // F, DQ, BW, VL
}

[[maybe_unused]] bool has_avx512_vnni() { return has_avx512() && bit(cpuid(7, 0).ecx, 11); }

[[maybe_unused]] bool has_avx512_bf16() { return has_avx512_vnni() && bit(cpuid(7, 1).eax, 5); }

// Intel's cores since Sapphire Rapids (they have AVX512-FP16) take two cycles for a dot product of bf16, in which they
// could do four multiply-adds of floats: 32 products in the place of 64. They leave bf16 to AMX, which not every virtual
// machine shows.
[[maybe_unused]] bool has_fast_bf16() {
    const Cpuid vendor = cpuid(0, 0);
    const bool is_intel = vendor.ebx == 0x756E6547 && vendor.edx == 0x49656E69 && vendor.ecx == 0x6C65746E;
    return !is_intel || !bit(cpuid(7, 0).edx, 23);
}

// Tiles must be asked for: the kernel keeps their 8 KiB only for processes that use them.
[[maybe_unused]] bool has_amx() {
#ifdef __linux__
    constexpr unsigned kTiles = 1u << 22 | 1u << 24 | 1u << 25;  // BF16, TILE, INT8
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    if (!has_avx512_bf16() || !os_saves(0x60000)) return false;
    if ((cpuid(7, 0).edx & kTiles) != kTiles) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}
#elif defined(__aarch64__) && defined(__linux__)
[[maybe_unused]] bool has_neon_dot() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }

[[maybe_unused]] bool has_neon_bf16() {
    constexpr unsigned long kBoth = HWCAP2_I8MM | HWCAP2_BF16;
    return has_neon_dot() && (getauxval(AT_HWCAP2) & kBoth) == kBoth;
}

// Vectors are of this length exactly: the kernels count on it.
[[maybe_unused]] bool has_sve256() {
    constexpr unsigned long kBoth = HWCAP2_SVEI8MM | HWCAP2_SVEBF16;
    if (!has_neon_bf16() || (getauxval(AT_HWCAP) & HWCAP_SVE) == 0 || (getauxval(AT_HWCAP2) & kBoth) != kBoth) return false;
    const int length = prctl(PR_SVE_GET_VL);
    return length >= 0 && (length & PR_SVE_VL_LEN_MASK) == 32;
}
#endif

std::string names(bool supported_only) {
    std::string text;
    for (const Tier &tier : compiled_tiers()) {
        if (supported_only && !tier.is_supported()) continue;
        if (!text.empty()) text += ", ";
        text += tier.name;
    }
    return text;
}

const Tier &find(const std::string &name, const std::string &origin) {
    for (const Tier &tier : compiled_tiers()) {
        if (name != tier.name) continue;
        if (!tier.is_supported())
            throw std::runtime_error(origin + " asks for kernels of tier '" + name +
                                     "', but this CPU (or its operating system) lacks the instructions; it can run: " +
                                     names(true));
        return tier;
    }
    throw std::invalid_argument(origin + " names an unknown tier '" + name + "'; this build has: " + names(false));
}

const Tier &choose() {
    const char *forced = std::getenv("HEADRACE_CPU_ISA");
    if (forced != nullptr && *forced != '\0') return find(forced, "HEADRACE_CPU_ISA");
    const Tier *best = nullptr;
    for (const Tier &tier : compiled_tiers())
        if (tier.is_supported() && tier.may_be_default()) best = &tier;
    return *best;
}

std::atomic<const Tier *> active{nullptr};

}  // namespace

const std::vector<Tier> &compiled_tiers() {
    static const std::vector<Tier> tiers = {
        {"scalar", scalar::table, always, always},
#ifdef HEADRACE_TIER_avx2
        {"avx2", avx2::table, has_avx2, always},
#endif
#ifdef HEADRACE_TIER_avx512
        {"avx512", avx512::table, has_avx512, always},
#endif
#ifdef HEADRACE_TIER_avx512_vnni
        {"avx512_vnni", avx512_vnni::table, has_avx512_vnni, always},
#endif
#ifdef HEADRACE_TIER_avx512_bf16
        {"avx512_bf16", avx512_bf16::table, has_avx512_bf16, has_fast_bf16},
#endif
#ifdef HEADRACE_TIER_avx512_amx
        {"avx512_amx", avx512_amx::table, has_amx, always},
#endif
#ifdef HEADRACE_TIER_neon_dot
        {"neon_dot", neon_dot::table, has_neon_dot, always},
#endif
#ifdef HEADRACE_TIER_neon_bf16
        {"neon_bf16", neon_bf16::table, has_neon_bf16, always},
#endif
#ifdef HEADRACE_TIER_sve256
        {"sve256", sve256::table, has_sve256, always},
#endif
#ifdef HEADRACE_TIER_emulated_avx512
        {"emulated_avx512", emulated_avx512::table, always, never},
#endif
#ifdef HEADRACE_TIER_emulated_avx512_vnni
        {"emulated_avx512_vnni", emulated_avx512_vnni::table, always, never},
#endif
#ifdef HEADRACE_TIER_emulated_avx512_bf16
        {"emulated_avx512_bf16", emulated_avx512_bf16::table, always, never},
#endif
#ifdef HEADRACE_TIER_emulated_amx
        {"emulated_amx", emulated_amx::table, always, never},
#endif
    };
    return tiers;
}

const Tier &active_tier() {
    const Tier *tier = active.load(std::memory_order_acquire);
    if (tier == nullptr) {
        tier = &choose();
        active.store(tier, std::memory_order_release);
    }
    return *tier;
}

void set_active_tier(const std::string &name) {
    active.store(&find(name, "set_isa"), std::memory_order_release);
}

}  // namespace headrace
