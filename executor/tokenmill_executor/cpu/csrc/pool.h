// Threads that share the work of a step, made so that a step never waits for a thread that the machine does not run.
//
// A step is a list of jobs, each begun when the one before it is done, and a job is many tasks. All threads are equals: each takes
// chunks of tasks, and whoever ends the last task of a job opens the next one. On a machine whose cores are busy with other processes
// a thread that comes late finds less to do, and one that does not come costs nothing. A thread that is stopped with a chunk in hand
// loses it, where the job's tasks can be begun again: another thread that has waited for it takes over what is left of the chunk.
// (OpenMP's fork and join wait for every thread at every loop. Beginning the work of a straggler again is MapReduce's backup task;
// Dean and Ghemawat, 2004.)
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <type_traits>

namespace tokenmill {

// What a thread holds, for the others to see, and what a task that can be begun again last took it: ticks of the processor's clock.
struct alignas(64) Hand {
    std::atomic<uint64_t> held{0};
    uint64_t task_ticks = 0;
};

// Stands before the results of a task that can be begun again. The thread that passes writes them, and nobody else does.
class Gate {
  public:
    Gate() = default;  // open to all
    Gate(Hand& hand, uint64_t running, uint64_t writing) : hand_(&hand), running_(running), writing_(writing) {}

    // False: the task has become another thread's, and nothing of it may be written any more.
    bool pass() const {
        uint64_t held = running_;
        return !hand_ || hand_->held.compare_exchange_strong(held, writing_, std::memory_order_acq_rel);
    }

  private:
    Hand* hand_ = nullptr;
    uint64_t running_ = 0, writing_ = 0;
};

// A function that is called for each of some tasks, kept by value: what it refers to must live until the step is done.
struct Job {
    static constexpr int kMostBytes = 192;
    using Call = void (*)(const void* function, int task, int worker, const Gate& gate);

    Call call;
    int tasks;
    bool can_restart;
    alignas(16) char function[kMostBytes];
};

constexpr int kMostRestartable = (1 << 18) - 1;  // tasks of a job: a hand has room for no larger numbers

// The threads of one step. There is one pool in a process: a second step waits in this constructor until the first has ended.
class Team {
  public:
    explicit Team(int threads);

    // Adds a job that calls f(task, worker) for each task below `tasks`, in any order and on any thread. Results must not depend on
    // `worker`, a number below `threads` that picks scratch memory.
    template <typename F>
    void each(int tasks, const F& f) {
        add<F>(tasks, f, false, [](const void* function, int task, int worker, const Gate&) { (*(const F*)function)(task, worker); });
    }

    // As `each`, of f(task, worker, gate), which writes outside of its worker's scratch memory only once it has passed the gate, and
    // then ends; each call comes to it. While one has not, another thread may do the same task, and later jobs may be under way: it then
    // computes from anything, but never reads or writes outside of what belongs to the step.
    template <typename F>
    void each_restartable(int tasks, const F& f) {
        add<F>(tasks, f, tasks <= kMostRestartable, [](const void* function, int task, int worker, const Gate& gate) {
            (*(const F*)function)(task, worker, gate);
        });
    }

    // Does the jobs that were added, in order, and is called once; returns when all is done and no thread looks at any of it any more.
    void run();

  private:
    template <typename F>
    void add(int tasks, const F& f, bool can_restart, Job::Call call) {
        static_assert(sizeof(F) <= Job::kMostBytes && alignof(F) <= 16 && std::is_trivially_copyable_v<F>);
        if (tasks <= 0) return;
        Job& job = new_job(tasks);
        job.call = call;
        job.tasks = tasks;
        job.can_restart = can_restart;
        std::memcpy(job.function, (const void*)&f, sizeof f);
    }

    Job& new_job(int tasks);

    const int threads_;
    bool gathered_ = false;  // the other threads are up
    const std::unique_lock<std::mutex> held_;
};

}  // namespace tokenmill
