#include "prefault.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#ifndef MADV_POPULATE_WRITE  // since Linux 5.14
#define MADV_POPULATE_WRITE 23
#endif
#endif

namespace headrace {
namespace {

using Clock = std::chrono::steady_clock;

// At a time: what a step that begins meanwhile waits for at most.
constexpr std::size_t kPiece = std::size_t{2} << 20;
constexpr std::size_t kPage = 4096;

// Write to each page without changing what is there. False if the system has no memory for it.
bool prefault(char *data, std::size_t num_bytes) {
#ifdef __linux__
    if (madvise(data, num_bytes, MADV_POPULATE_WRITE) == 0) return true;
    if (errno != EINVAL) return false;  // known to this system
#endif
    for (std::size_t i = 0; i < num_bytes; i += kPage)
        __atomic_fetch_or(reinterpret_cast<int *>(data + i), 0, __ATOMIC_RELAXED);
    return true;
}

// This thread runs when no other wants to.
void yield_to_all() {
#ifdef SCHED_IDLE
    sched_param none{};
    (void)pthread_setschedparam(pthread_self(), SCHED_IDLE, &none);
#endif
}

}  // namespace

Prefault::Prefault(std::vector<Allocation> regions) : state_(new State), pid_(getpid()) {
    for (Allocation &memory : regions) state_->regions.push_back({std::move(memory)});
    rest();
    state_->thread = std::thread([state = state_] { state->run(); });
}

Prefault::~Prefault() {
    if (getpid() != pid_) return;
    {
        const std::lock_guard lock(state_->mutex);
        state_->ends = true;
    }
    state_->changed.notify_one();
    state_->thread.join();
    delete state_;
}

void Prefault::want(std::size_t region, std::size_t num_bytes) {
    {
        const std::lock_guard lock(state_->mutex);
        Region &of = state_->regions.at(region);
        of.goal = std::max(of.goal, std::min(num_bytes, of.memory.num_bytes));
    }
    state_->changed.notify_one();
}

void Prefault::hold() {
    state_->held_until.store(Clock::time_point::max().time_since_epoch().count(), std::memory_order_relaxed);
}

void Prefault::rest() {
    state_->held_until.store((Clock::now() + kRest).time_since_epoch().count(), std::memory_order_relaxed);
}

std::size_t Prefault::done(std::size_t region) const {
    const std::lock_guard lock(state_->mutex);
    return state_->regions.at(region).done;
}

Prefault::Region *Prefault::State::next() {
    const auto found = std::find_if(regions.begin(), regions.end(), [](const Region &r) { return r.done < r.goal; });
    return found == regions.end() ? nullptr : &*found;
}

void Prefault::State::run() {
    yield_to_all();
    std::unique_lock lock(mutex);
    while (!ends) {
        Region *region = next();
        if (region == nullptr) {
            changed.wait(lock);
            continue;
        }
        const Clock::time_point until{Clock::duration(held_until.load(std::memory_order_relaxed))};
        if (const Clock::time_point now = Clock::now(); now < until) {
            changed.wait_until(lock, std::min(until, now + kRest));
            continue;
        }
        char *data = region->memory.data + region->done;
        const std::size_t count = std::min(kPiece, region->goal - region->done);
        lock.unlock();
        const bool is_there = prefault(data, count);
        lock.lock();
        if (is_there)
            region->done += count;
        else
            region->goal = region->done;  // until somebody wants more
    }
}

}  // namespace headrace
