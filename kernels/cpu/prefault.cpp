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

Prefault::Prefault(std::vector<Allocation> regions) : pid_(getpid()) {
    for (Allocation &memory : regions) regions_.push_back({std::move(memory)});
    hold();
    thread_ = std::thread([this] { run(); });
}

Prefault::~Prefault() {
    if (getpid() != pid_) {  // a fork has no such thread
        thread_.detach();
        return;
    }
    {
        const std::lock_guard lock(mutex_);
        ends_ = true;
    }
    changed_.notify_one();
    thread_.join();
}

void Prefault::want(std::size_t region, std::size_t num_bytes) {
    {
        const std::lock_guard lock(mutex_);
        Region &of = regions_.at(region);
        of.goal = std::max(of.goal, std::min(num_bytes, of.memory.num_bytes));
    }
    changed_.notify_one();
}

void Prefault::hold() { held_until_.store((Clock::now() + kRest).time_since_epoch().count(), std::memory_order_relaxed); }

std::size_t Prefault::done(std::size_t region) const {
    const std::lock_guard lock(mutex_);
    return regions_.at(region).done;
}

Prefault::Region *Prefault::next() {
    const auto found = std::find_if(regions_.begin(), regions_.end(), [](const Region &r) { return r.done < r.goal; });
    return found == regions_.end() ? nullptr : &*found;
}

void Prefault::run() {
    yield_to_all();
    std::unique_lock lock(mutex_);
    while (!ends_) {
        Region *region = next();
        if (region == nullptr) {
            changed_.wait(lock);
            continue;
        }
        const Clock::time_point until{Clock::duration(held_until_.load(std::memory_order_relaxed))};
        if (Clock::now() < until) {
            changed_.wait_until(lock, until);
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
