// Pages of KV caches, taken from the system before a step writes to them.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

#include "memory.h"

namespace headrace {

// A thread that prefaults memory while nobody computes. The first write to a page makes the system find and clear it, which
// takes 0.1 ms a MiB where memory is at hand and some 3 ms in a virtual machine that must ask its host for it.
class Prefault {
  public:
    explicit Prefault(std::vector<Allocation> regions);
    ~Prefault();
    Prefault(const Prefault &) = delete;
    Prefault &operator=(const Prefault &) = delete;

    // The first num_bytes of a region (or all of it) shall be there. A goal is never lowered.
    void want(std::size_t region, std::size_t num_bytes);
    // Somebody computes, until kRest after `rest`: nothing is done.
    void hold();
    void rest();
    // How much of a region this object has prefaulted, in bytes from its start.
    std::size_t done(std::size_t region) const;

    static constexpr auto kRest = std::chrono::milliseconds(20);

  private:
    struct Region {
        Allocation memory;
        std::size_t goal = 0, done = 0;
    };

    // Apart, since a fork must leave it as it is: nobody can wake or join a thread that is not there.
    struct State {
        std::mutex mutex;
        std::condition_variable changed;
        std::vector<Region> regions;
        bool ends = false;
        std::atomic<std::chrono::steady_clock::rep> held_until{0};
        std::thread thread;

        void run();
        // The next piece to prefault, or null. Needs the lock.
        Region *next();
    };

    State *state_;
    const int pid_;
};

}  // namespace headrace
