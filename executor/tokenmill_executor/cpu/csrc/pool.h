// Threads that share the tasks of a step, made so that a step never waits for a thread that the machine does not run.
//
// The calling thread takes chunks of tasks as the others do and waits only for chunks that another has begun: on a machine whose
// cores are busy with other processes, a thread that comes late finds less to do, and one that does not come costs nothing.
// (OpenMP's fork and join wait for every thread at every loop.)
#pragma once

#include <mutex>

namespace tokenmill {

// The threads of one step. There is one pool in a process: a second step waits in this constructor until the first has ended.
class Team {
  public:
    explicit Team(int threads);

    // Calls f(task, worker) for each task below `tasks`, in any order and on any thread; returns when all are done. Results must
    // not depend on `worker`, a number below `threads` that picks scratch memory. Not to be called from within f.
    template <typename F>
    void each(int tasks, const F& f) {
        run(
            tasks,
            [](const void* context, int begin, int end, int worker) {
                for (int task = begin; task < end; task++) (*(const F*)context)(task, worker);
            },
            &f);
    }

  private:
    using Call = void (*)(const void* context, int begin, int end, int worker);
    friend class Pool;

    void run(int tasks, Call call, const void* context);

    const int threads_;
    const std::unique_lock<std::mutex> held_;
};

}  // namespace tokenmill
