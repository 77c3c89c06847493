// Clients on threads: what the library exports. `Model` comes from the generated part above.
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace {

typedef Model::Loss Loss;
constexpr int CHUNK = Model::blocks * LANES;  // samples that go through the layers together
enum Status { FINE, BAD_ROW, BAD_TARGET, NO_MEMORY };

// Every thread has a workspace of its own, made when it first works.
V* workspace() {
    struct Room {
        void* at = nullptr;
        ~Room() { std::free(at); }
    };
    static thread_local Room room;
    if (!room.at && posix_memalign(&room.at, 64, sizeof(V) * (size_t)Model::workspace)) throw std::bad_alloc();
    return (V*)room.at;
}

// Threads that sleep between calls. Whoever wakes after the work has been done is not waited for. A forked
// child starts its own: threads do not survive a fork.
struct Crew {
    pid_t owner = getpid();
    std::mutex one_call, mutex;
    std::condition_variable wake, done;
    int hired = 0, wanted = 0, busy = 0;
    bool open = false;
    uint64_t turn = 0;
    void (*work)(void*, V*) = nullptr;
    void* job = nullptr;

    void member(int id, uint64_t seen) {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            wake.wait(lock, [&] { return turn != seen; });
            seen = turn;
            if (!open || id >= wanted) continue;
            busy++;
            lock.unlock();
            try {
                work(job, workspace());
            } catch (const std::bad_alloc&) {  // fewer hands do the same work
            }
            lock.lock();
            if (--busy == 0) done.notify_one();
        }
    }

    void hire(int threads) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the interpreter's
        for (; hired < threads - 1; hired++) {
            try {
                std::thread([this, id = hired + 1, now = turn] { member(id, now); }).detach();
            } catch (...) {
                break;
            }
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void run(int threads, void (*f)(void*, V*), void* what) {
        V* mine = workspace();
        std::lock_guard<std::mutex> call(one_call);
        {
            std::lock_guard<std::mutex> lock(mutex);
            hire(threads);
            wanted = threads, work = f, job = what, open = true, turn++;
            wake.notify_all();
        }
        f(what, mine);
        std::unique_lock<std::mutex> lock(mutex);
        open = false;
        done.wait(lock, [&] { return busy == 0; });
    }
};

Crew& crew() {
    static std::atomic<Crew*> current{nullptr};
    Crew* c = current.load();
    if (!c || c->owner != getpid()) {
        Crew* fresh = new Crew;  // the old one, if any, belongs to the parent process: leave it as it is
        if (current.compare_exchange_strong(c, fresh)) return *fresh;
        delete fresh;
    }
    return *current.load();
}

// A number in which every bit depends on every bit of the given one (splitmix64).
uint64_t mixed(uint64_t z) {
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// One chunk's samples: a full last block repeats its last sample, which then weighs nothing.
struct Chunk {
    const float* inputs[CHUNK];
    const Loss::Target* targets[CHUNK];
    float share[CHUNK];
    uint64_t key[CHUNK];
    int samples = 0;

    int close() {
        int blocks = (samples + LANES - 1) / LANES;
        for (int s = samples; s < blocks * LANES; s++)
            inputs[s] = inputs[samples - 1], targets[s] = targets[samples - 1], share[s] = 0, key[s] = 0;
        return blocks;
    }
};

double chunk_gradient(Chunk& c, const float* p, const float* q, float* g, bool add, V* workspace) {
    float loss[CHUNK];
    double sum = 0;
    int blocks = c.close();
    Model::targets(c.targets, workspace, blocks);
    Model::forward(p, q, workspace, c.inputs, c.key, blocks, c.samples);
    for (int n = 0; n < blocks; n++) {
        V share = load(c.share + n * LANES);
        Loss::run(workspace + Model::output + n * Model::outputs, c.targets + n * LANES, share, loss + n * LANES,
                  workspace + Model::output_gradient + n * Model::outputs, nullptr);
    }
    for (int s = 0; s < c.samples; s++) sum += double(c.share[s]) * loss[s];
    Model::backward(p, q, g, workspace, c.inputs, c.key, blocks, c.samples, add);
    return sum;
}

struct Gradient : GradientJob {
    bool split = false;  // chunks, not clients, go to threads; only if each adds to a parameter once, or bits would differ
    std::vector<float> parts;
    std::vector<double> part_losses;
    std::atomic<int64_t> next{0};
    std::atomic<int> status{FINE};

    Gradient(const GradientJob& job) : GradientJob(job) {}
    int64_t chunks() const { return (batch + CHUNK - 1) / CHUNK; }

    // f(chunk, its number) for the client's samples that weigh something, in order.
    template <class F>
    void each_chunk(int64_t client, int64_t only, F f) {
        double all = 0;
        for (int64_t b = 0; b < batch; b++) all += weight ? weight[client * batch + b] : 1.f;
        Chunk c;
        int64_t number = 0;
        for (int64_t b = 0; b < batch; b++) {
            int64_t k = client * batch + b;
            float w = weight ? weight[k] : 1.f;
            if (w == 0) continue;
            int64_t row = input_rows ? input_rows[k] : k, target = target_rows[k];
            if (row < 0 || row >= input_count || target < 0 || target >= target_count) return fail(BAD_ROW);
            c.inputs[c.samples] = inputs + row * Model::inputs;
            c.targets[c.samples] = (const Loss::Target*)targets + target * Loss::targets;
            if (!Loss::valid(c.targets[c.samples])) return fail(BAD_TARGET);
            c.share[c.samples] = float(w / all);
            c.key[c.samples] = dropout_keys ? mixed(dropout_keys[client] + mixed(uint64_t(b))) : 0;
            if (++c.samples < CHUNK) continue;
            if (only < 0 || number == only) f(c, number);
            number++, c.samples = 0;
        }
        if (c.samples && (only < 0 || number == only)) f(c, number);
    }

    void fail(Status s) { status = s; }

    void client(int64_t i, V* workspace) {
        float* to = grads + i * Model::parameters;
        double loss = 0;
        bool any = false;
        each_chunk(i, -1, [&](Chunk& c, int64_t) {
            loss += chunk_gradient(c, params + i * Model::parameters, constants, to, any, workspace);
            any = true;
        });
        if (!any) {  // its running statistics stay as they are
            std::memset(to, 0, sizeof(float) * Model::statistics);
            std::memcpy(to + Model::statistics, params + i * Model::parameters + Model::statistics,
                        sizeof(float) * (Model::parameters - Model::statistics));
        }
        losses[i] = float(loss);
    }

    void part(int64_t unit, V* workspace) {
        int64_t i = unit / chunks();
        float* to = parts.data() + unit * Model::parameters;
        each_chunk(i, unit % chunks(), [&](Chunk& c, int64_t) {
            part_losses[unit] = chunk_gradient(c, params + i * Model::parameters, constants, to, false, workspace);
        });
    }

    void combine() {
        for (int64_t i = 0; i < clients; i++) {
            double loss = 0;
            float* to = grads + i * Model::parameters;
            std::memcpy(to, parts.data() + i * chunks() * Model::parameters, sizeof(float) * Model::parameters);
            for (int64_t c = 0; c < chunks(); c++) {
                const float* from = parts.data() + (i * chunks() + c) * Model::parameters;
                loss += part_losses[i * chunks() + c];
                if (c)
                    for (int64_t k = 0; k < Model::parameters; k++) to[k] += from[k];
            }
            losses[i] = float(loss);
        }
    }

    // Ask for a small client's samples while the one before it is computed: they lie anywhere in the table.
    void prefetch(int64_t client) const {
        constexpr int64_t bytes = Model::inputs * (int64_t)sizeof(float);
        if (!input_rows || client >= clients || batch * bytes > (1 << 14)) return;
        for (int64_t b = 0; b < batch; b++) {
            int64_t row = input_rows[client * batch + b];
            if (row < 0 || row >= input_count) return;  // said when its turn comes
            const char* at = (const char*)(inputs + row * Model::inputs);
            for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + line);
        }
    }

    static void work(void* self, V* workspace) {
        Gradient& job = *(Gradient*)self;
        int64_t units = job.split ? job.clients * job.chunks() : job.clients;
        int64_t step = units / 64 + 1;
        for (int64_t i; (i = job.next.fetch_add(step)) < units && job.status == FINE;)
            for (int64_t k = i; k < i + step && k < units; k++)
                if (job.split) {
                    job.part(k, workspace);
                } else {
                    job.prefetch(k + 1);
                    job.client(k, workspace);
                }
    }
};

struct Evaluation : EvaluateJob {
    std::atomic<int64_t> next{0};
    std::atomic<int> status{FINE};

    Evaluation(const EvaluateJob& job) : EvaluateJob(job) {}

    void chunk(int64_t from, V* workspace) {
        Chunk c;
        for (int64_t k = from; k < count && k < from + CHUNK; k++, c.samples++) {
            c.inputs[c.samples] = inputs + k * Model::inputs;
            c.targets[c.samples] = (const Loss::Target*)targets + k * Loss::targets;
            if (!Loss::valid(c.targets[c.samples])) return status.store(BAD_TARGET);
        }
        float loss[CHUNK];
        int64_t top[CHUNK];
        int blocks = c.close();
        Model::targets(c.targets, workspace, blocks);
        Model::forward(params, constants, workspace, c.inputs, nullptr, blocks, c.samples);
        for (int n = 0; n < blocks; n++)
            Loss::run(workspace + Model::output + n * Model::outputs, c.targets + n * LANES, V{}, loss + n * LANES,
                      nullptr, classes ? top + n * LANES : nullptr);
        std::memcpy(losses + from, loss, sizeof(float) * c.samples);
        if (classes) std::memcpy(classes + from, top, sizeof(int64_t) * c.samples);
    }

    static void work(void* self, V* workspace) {
        Evaluation& job = *(Evaluation*)self;
        for (int64_t from; (from = job.next.fetch_add(CHUNK)) < job.count && job.status == FINE;)
            job.chunk(from, workspace);
    }
};

template <class Job>
int run(Job& job, int64_t units, int threads) {
    if (units < threads) threads = units > 1 ? int(units) : 1;
    if (threads > 1)
        crew().run(threads, Job::work, &job);
    else
        Job::work(&job, workspace());
    return job.status;
}

}  // namespace

extern "C" int fedbraid_gradient(const GradientJob* given) {
    try {
        Gradient job(*given);
        int64_t units = job.clients * job.chunks();
        job.split = Model::once && job.clients < job.threads && job.chunks() > 1 && units * Model::parameters < (1 << 24);
        if (!job.split) return run(job, job.clients, job.threads);
        job.parts.assign(units * Model::parameters, 0.f);
        job.part_losses.assign(units, 0.);
        int status = run(job, units, job.threads);
        if (status == FINE) job.combine();
        return status;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}

extern "C" int fedbraid_evaluate(const EvaluateJob* given) {
    try {
        Evaluation job(*given);
        return run(job, (job.count + CHUNK - 1) / CHUNK, job.threads);
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}
