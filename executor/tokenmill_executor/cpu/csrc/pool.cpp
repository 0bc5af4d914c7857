#include "pool.h"

#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

namespace tokenmill {
namespace {

constexpr int kShare = 2;        // a chunk is this part of what would be a thread's even share of the tasks left
constexpr int kMostThreads = 255;
constexpr int kPatience = 4;     // times what a task takes: so long without progress, and a thread counts as stopped
constexpr auto kSpin = std::chrono::microseconds(100);  // longer than from one job of a step to the next

// What can be taken: a number of a job, how many of its tasks nobody has taken, and how many threads the step is for.
struct Open {
    int threads, job, left;

    static Open of(uint64_t word) { return {int(word >> 56), int(word >> 32 & 0xffffff), int(uint32_t(word))}; }
    uint64_t word() const { return uint64_t(threads) << 56 | uint64_t(job) << 32 | uint32_t(left); }
    bool is_for(int worker) const { return left && worker < threads; }
};

// Of a step for so many threads, tasks `begin` to `end` were taken as one chunk, and those before `next` are done.
struct Chunk {
    static constexpr int kBits = 18, kMost = 1 << kBits;
    int threads, begin, next, end;

    static Chunk of(uint64_t word) {
        const auto field = [=](int number) { return int(word >> number * kBits) & (kMost - 1); };
        return {int(word >> 3 * kBits) & 0xff, field(2), field(1), field(0)};
    }
    uint64_t word() const { return ((uint64_t(threads) << kBits | uint64_t(begin)) << kBits | uint64_t(next)) << kBits | uint64_t(end); }
};

// States of a hand, in the bits above its chunk. kNothing and kLost have none.
constexpr uint64_t kNothing = 0, kRunning = uint64_t(1) << 62, kWriting = uint64_t(2) << 62, kLost = uint64_t(3) << 62;
constexpr uint64_t kStates = kLost;
static_assert(3 * Chunk::kBits + 8 <= 62 && kMostRestartable < Chunk::kMost);

}  // namespace

// A job's record is read only by a thread that holds some of its tasks: until those are done the job is not over, and the list of jobs
// does not change. A thread that was stopped before it took any may so take some of a later job, rightly.
class Pool {
  public:
    std::mutex mutex;  // of the caller
    std::vector<Job> jobs;

    static Pool& shared() {
        static Pool& pool = *new Pool;  // never destroyed: its threads live until the process ends
        return pool;
    }

    // Also wakes them: they are up when the first job is there.
    void gather(int threads) {
        try {
            for (; workers_ + 1 < threads; workers_++)
                std::thread([this, worker = workers_ + 1] { work(worker); }).detach();
        } catch (const std::system_error&) {
            // No more threads are to be had: those that are there, with the caller, do the work.
        }
        wake();
    }

    void run(int threads) {
        open_next(threads, -1, 0);
        while (!is_over()) {
            if (!take(0)) rest(0, [this] { return is_over(); });
        }
        // Who has lost a chunk and was not told yet still reads.
        for (int i = 0; i <= workers_; i++)
            for (uint64_t held; (held = hands_[i].held.load()) != kNothing;) hands_[i].held.wait(held);
    }

  private:
    // Waits a while for something to do, first awake, then asleep: the core is then free for a thread that is waited for.
    template <typename F>
    void rest(int worker, const F& is_over) {
        const auto ready = [&] { return Open::of(open_.load(std::memory_order_relaxed)).is_for(worker) || is_over(); };
        Watch watch;
        const auto begin = std::chrono::steady_clock::now();
        do {
            for (int i = 0; i < 32; i++) {
                if (ready()) return;
                _mm_pause();
            }
            if (relieve(worker, watch)) return;
        } while (watch.held != kNothing || std::chrono::steady_clock::now() - begin < kSpin);
        // In this order, so that what happens meanwhile is seen here or its author sees this thread.
        const uint32_t seen = wake_ups_.load();
        sleeping_.store(1);
        if (!ready()) wake_ups_.wait(seen);
    }

    void wake() {
        if (sleeping_.load() && sleeping_.exchange(0)) {
            wake_ups_.fetch_add(1);
            wake_ups_.notify_all();
        }
    }

    void work(int worker) {
        for (;;)
            if (!take(worker)) rest(worker, [] { return false; });
    }

    bool is_over() const {
        const Open open = Open::of(open_.load());
        return open.job == int(jobs.size());
    }

    // Does one chunk, if there is one. Chunks shrink with what is left: neighbouring tasks mostly stay together, and the last chunk,
    // which others may wait for, is short.
    bool take(int worker) {
        uint64_t word = open_.load();
        Open open;
        int count;
        do {
            open = Open::of(word);
            if (!open.is_for(worker)) return false;
            count = std::max(1, open.left / (kShare * open.threads));
        } while (!open_.compare_exchange_weak(word, Open{open.threads, open.job, open.left - count}.word()));
        const int begin = jobs[open.job].tasks - open.left;
        carry_out(open.job, worker, {open.threads, begin, begin, begin + count});
        return true;
    }

    void carry_out(int number, int worker, Chunk chunk) {
        const Job& job = jobs[number];
        Hand& hand = hands_[worker];
        if (job.can_restart) {
            const uint64_t begin = __rdtsc();
            const int first = chunk.next;
            for (; chunk.next < chunk.end; chunk.next++) {
                const uint64_t running = kRunning | chunk.word();
                hand.held.store(running, std::memory_order_release);
                job.call(job.function, chunk.next, worker, Gate(hand, running, kWriting | chunk.word()));
                if (hand.held.load(std::memory_order_relaxed) == kLost) {
                    hand.held.store(kNothing);
                    hand.held.notify_one();
                    return;
                }
            }
            hand.held.store(kNothing, std::memory_order_release);
            hand.task_ticks = (__rdtsc() - begin) / uint64_t(chunk.end - first);
        } else {
            for (; chunk.next < chunk.end; chunk.next++) job.call(job.function, chunk.next, worker, Gate());
        }
        const int done = chunk.end - chunk.begin, tasks = job.tasks;
        if (done_.fetch_add(done) + done == tasks) open_next(chunk.threads, number, worker);
    }

    // Whoever ends a job does what the next ones have for one thread alone, and opens the first that has more.
    void open_next(int threads, int job, int worker) {
        const int count = int(jobs.size());
        for (job++; job < count && jobs[job].tasks == 1; job++) jobs[job].call(jobs[job].function, 0, worker, Gate());
        done_.store(0, std::memory_order_relaxed);
        open_.store(Open{threads, job, job < count ? jobs[job].tasks : 0}.word());
        wake();
    }

    // What a resting thread has seen in another's hand, and since when.
    struct Watch {
        uint64_t held = kNothing, since = 0;
        int worker = 0;
    };

    // Takes over the chunk of a thread that gets nowhere. Returns whether it did.
    bool relieve(int worker, Watch& watch) {
        const int hands = workers_ + 1;
        int other = watch.worker;
        uint64_t held;
        for (int seen = 0;; other = (other + 1) % hands) {
            held = hands_[other].held.load(std::memory_order_relaxed);
            if (other != worker && (held & kStates) == kRunning) break;
            if (seen++ == hands) {
                watch.held = kNothing;
                return false;
            }
        }
        const uint64_t now = __rdtsc();
        if (held != watch.held || other != watch.worker) {
            watch = {held, now, other};
            return false;
        }
        if (now - watch.since <= kPatience * hands_[worker].task_ticks) return false;
        watch.held = kNothing;
        const Chunk chunk = Chunk::of(held);
        if (worker >= chunk.threads || !hands_[other].held.compare_exchange_strong(held, kLost)) return false;
        // The job is the one that is open: without these tasks it does not end.
        carry_out(Open::of(open_.load()).job, worker, chunk);
        return true;
    }

    std::atomic<int> workers_{0};
    alignas(64) std::atomic<uint64_t> open_{0};  // an Open
    alignas(64) std::atomic<int32_t> done_{0};   // tasks of the job that is open
    alignas(64) std::atomic<uint32_t> wake_ups_{0};
    std::atomic<int32_t> sleeping_{0};
    Hand hands_[kMostThreads];
};

Team::Team(int threads) : threads_(std::min(threads, kMostThreads)), held_(Pool::shared().mutex) {
    Pool::shared().jobs.clear();
}

Job& Team::new_job(int tasks) {
    if (tasks > 1 && threads_ > 1 && !gathered_) {
        gathered_ = true;
        Pool::shared().gather(threads_);
    }
    return Pool::shared().jobs.emplace_back();
}

void Team::run() {
    if (gathered_) {
        Pool::shared().run(threads_);
    } else {
        for (const Job& job : Pool::shared().jobs)
            for (int task = 0; task < job.tasks; task++) job.call(job.function, task, 0, Gate());
    }
}

}  // namespace tokenmill
