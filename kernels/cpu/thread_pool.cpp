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

namespace headrace {
namespace {

// How long a thread spins before it sleeps: longer than the gap between two ops of a step, far shorter than the
// time that anybody would notice a busy core.
constexpr auto kSpin = std::chrono::microseconds(200);

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Wait until `word` is no longer `old`.
void wait_while(const std::atomic<unsigned> &word, unsigned old) {
    const auto give_up = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 64; ++i) {
            if (word.load(std::memory_order_acquire) != old) return;
            pause();
        }
    } while (std::chrono::steady_clock::now() < give_up);
    while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
}

struct AlignedFree {
    void operator()(char *data) const { std::free(data); }
};

// Owns the workers (threads 1 .. n - 1). One region at a time: the caller holds `mutex`.
class Pool {
  public:
    explicit Pool(int num_threads) : scratch_(static_cast<std::size_t>(num_threads)) {
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
        start();
        body(context(0));
        barrier();
        body_ = nullptr;
    }

    void barrier() {
        if (size() == 1) return;
        const unsigned generation = generation_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<unsigned>(size())) {
            arrived_.store(0, std::memory_order_relaxed);
            generation_.store(generation + 1, std::memory_order_release);
            generation_.notify_all();
        } else {
            wait_while(generation_, generation);
        }
    }

  private:
    void stop() {
        body_ = nullptr;
        start();
        for (std::thread &worker : workers_) worker.join();
    }

    void start() {
        region_.fetch_add(1, std::memory_order_release);
        region_.notify_all();
    }

    void work(int thread) {
        for (unsigned seen = 0;;) {
            wait_while(region_, seen);
            ++seen;
            if (body_ == nullptr) return;
            (*body_)(context(thread));
            barrier();
        }
    }

    Context context(int thread) {
        return {thread, size(), scratch_[static_cast<std::size_t>(thread)].get(), this,
                [](void *pool) { static_cast<Pool *>(pool)->barrier(); }};
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

    std::vector<std::unique_ptr<char, AlignedFree>> scratch_;  // one a thread
    std::size_t scratch_bytes_ = 0;
    const std::function<void(const Context &)> *body_ = nullptr;  // null asks the workers to end
    std::vector<std::thread> workers_;
    alignas(64) std::atomic<unsigned> region_{0};      // counts regions; workers wait for the next one
    alignas(64) std::atomic<unsigned> arrived_{0};     // threads now at the barrier
    alignas(64) std::atomic<unsigned> generation_{0};  // counts barriers passed
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
