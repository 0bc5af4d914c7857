// What a step's threads promise, with threads that are stopped where it hurts. Exits with 1 and says what does not hold.
#include "pool.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

using namespace tokenmill;

static void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

constexpr int kTasks = 300;
constexpr int kJobs = 20;

struct Seen {
    std::atomic<int> begun[kTasks]{}, written[kTasks]{};
    std::atomic<int> stopped{0};
    std::atomic<bool> go_on{false}, over{false};
};

static void stop(Seen& seen) {
    seen.stopped++;
    while (!seen.go_on) std::this_thread::yield();
}

// Who does a task for the first time as worker `who` is stopped in the middle, and not let go before all later jobs are done.
static void a_stopped_thread_keeps_nobody_waiting(int threads, int who) {
    Seen seen;
    std::atomic<int> later{0};
    Seen* const s = &seen;
    std::atomic<int>* const l = &later;
    Team team(threads);
    team.each_restartable(kTasks, [s, who](int task, int worker, const Gate& gate) {
        s->begun[task]++;
        // The others leave it something.
        while (worker != who && !s->stopped) std::this_thread::yield();
        if (worker == who && !s->stopped) stop(*s);
        if (gate.pass()) s->written[task]++;
    });
    for (int job = 0; job < kJobs; job++) team.each(kTasks, [l](int, int) { (*l)++; });
    team.each(1, [s](int, int) { s->go_on = true; });
    team.run();
    int again = 0;
    for (int task = 0; task < kTasks; task++) {
        require(seen.written[task] == 1, "a task's results were not written exactly once");
        again += seen.begun[task] - 1;
    }
    require(again >= 1, "the stopped task was not begun again");
    require(later == kJobs * kTasks, "a later job was not done");
}

// Jobs in order, each task once, however many threads there are.
static void jobs_are_done_in_order(int threads) {
    std::vector<int> values(kTasks, 0);
    int* const v = values.data();
    Team team(threads);
    for (int job = 0; job < kJobs; job++) {
        team.each_restartable(kTasks, [v, job](int task, int, const Gate& gate) {
            const int before = v[task];
            if (gate.pass()) v[task] = before == 3 * job ? before + 1 : -1000;
        });
        team.each(1, [v, job](int, int) {
            for (int task = 0; task < kTasks; task++) v[task] = v[task] == 3 * job + 1 ? v[task] + 1 : -1000;
        });
        team.each(kTasks, [v, job](int task, int) { v[task] = v[task] == 3 * job + 2 ? v[task] + 1 : -1000; });
        team.each(0, [v](int task, int) { v[task] = -1000; });
    }
    team.run();
    for (int value : values) require(value == 3 * kJobs, "jobs were not done in order, each task once");
}

int main() {
    for (int round = 0; round < 50; round++) {
        for (int threads : {1, 2, 3, 8}) jobs_are_done_in_order(threads);
        for (int threads : {2, 3, 8}) {
            a_stopped_thread_keeps_nobody_waiting(threads, 0);
            a_stopped_thread_keeps_nobody_waiting(threads, threads - 1);
        }
    }
}
