#include "thread_pool.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "numa.h"

namespace headrace {
namespace {

// How long a thread spins before it sleeps: longer than the gap between two steps of one stream, far shorter than
// the time that anybody would notice a busy core.
constexpr auto kSpin = std::chrono::microseconds(500);

// So many threads at most look at each other's flags; more meet at the first one's.
constexpr int kAllToAll = 8;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// While it lives, numbers too small for a full mantissa count as zero: they cost some CPUs a hundred times as much.
class FlushDenormals {
  public:
#if defined(__x86_64__)
    FlushDenormals() : before_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(before_ | 0x8040); }
    ~FlushDenormals() { __builtin_ia32_ldmxcsr(before_); }

  private:
    unsigned before_;
#elif defined(__aarch64__)
    FlushDenormals() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(before_));
        __asm__ volatile("msr fpcr, %0" : : "r"(before_ | (1UL << 24)));
    }
    ~FlushDenormals() { __asm__ volatile("msr fpcr, %0" : : "r"(before_)); }

  private:
    unsigned long before_;
#else
    FlushDenormals() {}
#endif
};

// A count that one thread raises and others wait for, in a cache line of its own.
struct alignas(64) Flag {
    std::atomic<unsigned> count{0};

    // Sequentially consistent, so that the look for sleepers comes after the store.
    void raise() {
        count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);
        count.notify_all();
    }

    // Counts may wrap around.
    bool has(unsigned target, unsigned *seen) const {
        *seen = count.load(std::memory_order_acquire);
        return static_cast<int>(*seen - target) >= 0;
    }

    void wait(unsigned target) const {
        unsigned seen;
        for (int i = 0; i < 64; ++i) {
            if (has(target, &seen)) return;
            pause();
        }
        const auto give_up = std::chrono::steady_clock::now() + kSpin;
        do {
            for (int i = 0; i < 64; ++i) {
                if (has(target, &seen)) return;
                pause();
            }
        } while (std::chrono::steady_clock::now() < give_up);
        while (!has(target, &seen)) count.wait(seen, std::memory_order_acquire);
    }
};

struct AlignedFree {
    void operator()(char *data) const { std::free(data); }
};

// Owns the workers (threads 1 .. n - 1). One region at a time: the caller holds `mutex`.
class Pool {
  public:
    explicit Pool(int num_threads)
        : scratch_(static_cast<std::size_t>(num_threads)), arrived_(static_cast<std::size_t>(num_threads)) {
        if (nodes_.size() < 2) nodes_ = {{}};
        try {
            for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this, i] { work(i); });
        } catch (...) {  // the system's limit on threads
            stop();
            throw;
        }
    }
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;
    ~Pool() { stop(); }

    int size() const { return static_cast<int>(scratch_.size()); }

    void run(std::size_t scratch_bytes, const std::function<void(const Context &)> &body) {
        reserve(scratch_bytes);
        body_ = &body;
        region_.raise();
        const KeptTo kept(cpus_of(0));
        const FlushDenormals flush;
        body(context(0));
        barrier(0);
        body_ = nullptr;
    }

    // No thread leaves before all have come.
    void barrier(int thread) {
        Flag &mine = arrived_[static_cast<std::size_t>(thread)];
        const unsigned target = mine.count.load(std::memory_order_relaxed) + 1;
        if (size() <= kAllToAll) {
            mine.raise();
            for (const Flag &flag : arrived_) flag.wait(target);
        } else if (thread == 0) {
            for (int other = 1; other < size(); ++other) arrived_[static_cast<std::size_t>(other)].wait(target);
            mine.raise();
        } else {
            mine.raise();
            arrived_[0].wait(target);
        }
    }

  private:
    void stop() {
        body_ = nullptr;
        region_.raise();
        for (std::thread &worker : workers_) worker.join();
    }

    // Where a thread belongs; none if it may run anywhere.
    const std::vector<int> &cpus_of(int thread) const {
        return nodes_[node_of_thread(thread, size(), nodes_.size())];
    }

    void work(int thread) {
        const KeptTo kept(cpus_of(thread));
        const FlushDenormals flush;
        for (unsigned next = 1;; ++next) {
            region_.wait(next);
            if (body_ == nullptr) return;
            (*body_)(context(thread));
            barrier(thread);
        }
    }

    Context context(int thread) {
        return {thread, size(), scratch_[static_cast<std::size_t>(thread)].get(), this,
                [](const Context &self) { static_cast<Pool *>(self.pool)->barrier(self.thread); }, nullptr, 0};
    }

    void reserve(std::size_t num_bytes) {
        if (num_bytes <= scratch_bytes_) return;
        const std::size_t size = (num_bytes + 4095) / 4096 * 4096;
        for (auto &scratch : scratch_) {
            scratch.reset();
            scratch.reset(static_cast<char *>(std::aligned_alloc(4096, size)));
            if (scratch == nullptr) {
                scratch_bytes_ = 0;
                throw std::bad_alloc();
            }
        }
        scratch_bytes_ = size;
    }

    Nodes nodes_ = numa_nodes();
    std::vector<std::unique_ptr<char, AlignedFree>> scratch_;  // one a thread
    std::size_t scratch_bytes_ = 0;
    const std::function<void(const Context &)> *body_ = nullptr;  // null asks the workers to end
    std::vector<std::thread> workers_;
    Flag region_;                // counts regions
    std::vector<Flag> arrived_;  // each thread's barriers
};

std::atomic<int> wanted{1};
std::atomic<long long> regions{0};

struct State {
    std::mutex mutex;
    std::unique_ptr<Pool> pool;
};

// Never destroyed: at exit the workers sleep, and the process ends around them.
std::atomic<State *> state{nullptr};

State &the_state() {
    static std::once_flag once;
    std::call_once(once, [] {
        state.store(new State);
        // A child of fork has none of the threads and maybe a locked mutex: it starts afresh, the old state is lost.
        pthread_atfork(nullptr, nullptr, [] { state.store(new State); });
    });
    return *state.load();
}

}  // namespace

int num_threads() { return wanted.load(); }

void set_num_threads(int count) {
    if (count < 1 || count > kMaxThreads)
        throw std::invalid_argument("the number of threads must be between 1 and " + std::to_string(kMaxThreads) +
                                    ", got " + std::to_string(count));
    wanted.store(count);
}

void parallel(std::size_t scratch_bytes, const std::function<void(const Context &)> &body) {
    State &mine = the_state();
    const std::lock_guard lock(mine.mutex);
    const int count = wanted.load();
    if (mine.pool == nullptr || mine.pool->size() != count) {
        mine.pool.reset();
        mine.pool = std::make_unique<Pool>(count);
    }
    ++regions;
    mine.pool->run(scratch_bytes, body);
}

long long num_regions() { return regions.load(); }

}  // namespace headrace
