#include "pool.h"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <system_error>
#include <thread>

namespace tokenmill {
namespace {

constexpr int kShare = 2;  // a chunk is this part of what would be a thread's even share of the tasks left
constexpr auto kSpin = std::chrono::microseconds(100);  // longer than from one job of a step to the next

// Polls for a short while. Returns whether it became true.
template <typename F>
bool spin_until(const F& true_now) {
    const auto begin = std::chrono::steady_clock::now();
    do {
        for (int i = 0; i < 32; i++) {
            if (true_now()) return true;
            _mm_pause();
        }
    } while (std::chrono::steady_clock::now() - begin < kSpin);
    return false;
}

}  // namespace

// One job at a time. A thread owns a chunk once it has counted `open_` down, and only then reads the job: the caller does not change
// it before every chunk that was taken is done. A thread that was stopped just before may thus take a chunk of a later job, rightly.
class Pool {
  public:
    std::mutex mutex;  // of the caller

    static Pool& shared() {
        static Pool& pool = *new Pool;  // never destroyed: its threads live until the process ends
        return pool;
    }

    void grow(int workers) {
        try {
            for (; workers_ < workers; workers_++) std::thread([this, worker = workers_ + 1] { work(worker); }).detach();
        } catch (const std::system_error&) {
            // No more threads are to be had: those that are there, with the caller, do the work.
        }
    }

    void run(int threads, int tasks, Team::Call call, const void* context) {
        job_ = {call, context, tasks};
        done_by_others_.store(0);
        open_.store(uint64_t(threads) << 32 | uint64_t(tasks));
        if (sleeping_.load() && sleeping_.exchange(0)) {
            wake_ups_.fetch_add(1);
            wake_ups_.notify_all();
        }
        int left = tasks;
        while (const int taken = take(0)) left -= taken;
        if (!left || spin_until([&] { return done_by_others_.load() == left; })) return;
        // Asleep, the core is free for the thread that is waited for.
        for (int done; (done = done_by_others_.load()) != left;) done_by_others_.wait(done);
    }

  private:
    struct Job {
        Team::Call call;
        const void* context;
        int tasks;
    };

    // Does one chunk of the job, if there is one and the job is for this worker; returns how many tasks that were. Chunks shrink
    // with what is left: neighbouring tasks mostly stay together, and the last chunk, which others may wait for, is short.
    int take(int worker) {
        uint64_t open = open_.load();
        int count;
        do {
            if (!is_for(worker, open)) return 0;
            count = std::max(1, int(uint32_t(open)) / (kShare * int(open >> 32)));
        } while (!open_.compare_exchange_weak(open, open - uint64_t(count)));
        const int begin = job_.tasks - int(uint32_t(open));
        job_.call(job_.context, begin, begin + count, worker);
        return count;
    }

    static bool is_for(int worker, uint64_t open) { return uint32_t(open) && worker < int(open >> 32); }

    void work(int worker) {
        for (;;) {
            if (spin_until([&] { return is_for(worker, open_.load(std::memory_order_relaxed)); })) {
                while (const int taken = take(worker)) {
                    done_by_others_.fetch_add(taken);
                    done_by_others_.notify_one();
                }
                continue;
            }
            // In this order, so that a job published meanwhile is seen here or its caller sees this thread.
            const uint32_t seen = wake_ups_.load();
            sleeping_.store(1);
            if (!is_for(worker, open_.load())) wake_ups_.wait(seen);
        }
    }

    Job job_{};
    int workers_ = 0;
    alignas(64) std::atomic<uint64_t> open_{0};  // threads of the job << 32 | tasks that nobody has taken
    alignas(64) std::atomic<int32_t> done_by_others_{0};
    alignas(64) std::atomic<uint32_t> wake_ups_{0};
    std::atomic<int32_t> sleeping_{0};
};

Team::Team(int threads) : threads_(threads), held_(Pool::shared().mutex) { Pool::shared().grow(threads - 1); }

void Team::run(int tasks, Call call, const void* context) {
    if (threads_ == 1 || tasks <= 1)
        call(context, 0, tasks, 0);
    else
        Pool::shared().run(threads_, tasks, call, context);
}

}  // namespace tokenmill
