// Nodes of memory, each with the CPUs that are near it. On a machine with several, a thread keeps to one node, weights
// lie near the thread that multiplies them, and KV caches are dealt out over all nodes. With one, nothing is done.
#pragma once

#include <string>
#include <vector>

#include "memory.h"

namespace headrace {

using Nodes = std::vector<std::vector<int>>;

// CPUs of each node that this thread may run on, nodes without any left out. Empty if the system says nothing.
Nodes numa_nodes();

// Which of `num_nodes` a thread keeps to: neighbours, which have neighbouring shares of a weight, share a node.
inline std::size_t node_of_thread(int thread, int num_threads, std::size_t num_nodes) {
    return static_cast<std::size_t>(thread) * num_nodes / static_cast<std::size_t>(num_threads);
}

// Where nodes are described, instead of /sys/devices/system/node. For tests; no kernel may be running.
void set_numa_folder(const std::string &folder);

// While it lives, the calling thread runs on these CPUs only; where that is refused, or there are none, as before.
class KeptTo {
  public:
    explicit KeptTo(const std::vector<int> &cpus);
    ~KeptTo();
    KeptTo(const KeptTo &) = delete;
    KeptTo &operator=(const KeptTo &) = delete;

  private:
    std::vector<unsigned long> before_;
};

// Fresh memory, before it is written: each thread touches its share of it, so that it lies near that thread.
void place_by_threads(const Allocation &memory);

// Fresh memory: pages take turns among the nodes, as far as the system lets us (containers often may not).
void place_by_turns(const Allocation &memory);

}  // namespace headrace
