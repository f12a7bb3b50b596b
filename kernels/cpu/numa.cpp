#include "numa.h"

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <fstream>
#include <sstream>

#include "thread_pool.h"

namespace headrace {
namespace {

constexpr std::size_t kPage = 4096, kBits = 8 * sizeof(unsigned long), kMostCpus = 8192;

std::string folder = "/sys/devices/system/node";
std::atomic<int> num_known{-1};  // nodes that were found; -1 before anybody asked

// "0-3,8" as numbers; what is no list is none.
std::vector<int> read_list(const std::string &path) {
    std::vector<int> numbers;
    std::ifstream file(path);
    std::string text;
    std::getline(file, text);
    std::istringstream parts(text);
    for (std::string part; std::getline(parts, part, ',');) {
        std::istringstream range(part);
        int first = -1, last = -1;
        char dash = 0;
        if (!(range >> first)) return {};
        last = range >> dash >> last ? last : first;
        for (int number = first; number >= 0 && number <= last; ++number) numbers.push_back(number);
    }
    return numbers;
}

bool has(const std::vector<unsigned long> &mask, int bit) {
    const auto index = static_cast<std::size_t>(bit);
    return index / kBits < mask.size() && (mask[index / kBits] >> index % kBits & 1) != 0;
}

void set(std::vector<unsigned long> &mask, int bit) {
    const auto index = static_cast<std::size_t>(bit);
    if (index / kBits < mask.size()) mask[index / kBits] |= 1ul << index % kBits;
}

// The CPUs that this thread may run on; empty if the system does not say.
std::vector<unsigned long> affinity() {
#ifdef __linux__
    std::vector<unsigned long> mask(kMostCpus / kBits);
    if (syscall(SYS_sched_getaffinity, 0, mask.size() * sizeof mask[0], mask.data()) > 0) return mask;
#endif
    return {};
}

bool set_affinity([[maybe_unused]] const std::vector<unsigned long> &mask) {
#ifdef __linux__
    return syscall(SYS_sched_setaffinity, 0, mask.size() * sizeof mask[0], mask.data()) == 0;
#else
    return false;
#endif
}

// Numbers of the nodes, and the CPUs of each that this thread may run on.
std::vector<std::pair<int, std::vector<int>>> usable_nodes() {
    const std::vector<unsigned long> allowed = affinity();
    std::vector<std::pair<int, std::vector<int>>> nodes;
    for (const int node : read_list(folder + "/online")) {
        std::vector<int> cpus = read_list(folder + "/node" + std::to_string(node) + "/cpulist");
        cpus.erase(std::remove_if(cpus.begin(), cpus.end(), [&](int cpu) { return !has(allowed, cpu); }), cpus.end());
        if (!cpus.empty()) nodes.emplace_back(node, std::move(cpus));
    }
    return nodes;
}

// Weights are many, and nodes do not come and go.
bool has_several_nodes() {
    int known = num_known.load();
    if (known < 0) num_known.store(known = static_cast<int>(usable_nodes().size()));
    return known > 1;
}

}  // namespace

Nodes numa_nodes() {
    Nodes nodes;
    for (auto &[number, cpus] : usable_nodes()) nodes.push_back(std::move(cpus));
    return nodes;
}

void set_numa_folder(const std::string &other) {
    folder = other;
    num_known.store(-1);
}

KeptTo::KeptTo(const std::vector<int> &cpus) {
    if (cpus.empty()) return;
    std::vector<unsigned long> wanted(kMostCpus / kBits);
    for (const int cpu : cpus) set(wanted, cpu);
    before_ = affinity();
    if (before_.empty() || !set_affinity(wanted)) before_.clear();
}

KeptTo::~KeptTo() {
    if (!before_.empty()) set_affinity(before_);
}

void place_by_threads(const Allocation &memory) {
    if (!has_several_nodes()) return;
    parallel(0, [&](const Context &context) {
        std::int64_t begin, end;
        share(static_cast<std::int64_t>(memory.num_bytes / kPage), context, &begin, &end);
        // Untouched memory is zero, and nobody else writes it yet.
        for (std::int64_t page = begin; page < end; ++page)
            *static_cast<volatile char *>(memory.data + page * static_cast<std::int64_t>(kPage)) = 0;
    });
}

void place_by_turns([[maybe_unused]] const Allocation &memory) {
#ifdef __linux__
    if (!has_several_nodes()) return;
    constexpr int kInterleave = 3;  // MPOL_INTERLEAVE, of a header that is not everywhere
    constexpr unsigned long kMostNodes = 1024;
    std::vector<unsigned long> mask(kMostNodes / kBits);
    for (const auto &node : usable_nodes()) set(mask, node.first);
    const auto data = reinterpret_cast<std::uintptr_t>(memory.data);
    const std::uintptr_t first = (data + kPage - 1) / kPage * kPage, last = (data + memory.num_bytes) / kPage * kPage;
    if (first < last) (void)syscall(SYS_mbind, first, last - first, kInterleave, mask.data(), kMostNodes, 0u);
#endif
}

}  // namespace headrace
