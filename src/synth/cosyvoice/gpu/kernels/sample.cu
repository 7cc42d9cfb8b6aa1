// Sampling the next id of every row on the device. Continues llm.cu, whose records of slots it reads and writes.

DEV u32 order_key(float x) { u32 u = __float_as_uint(x); return u & 0x80000000u ? ~u : u | 0x80000000u; }
DEV void philox(u32 k0, u32 k1, u32 index, u32* out) {
    u32 c0 = index, c1 = 0, c2 = 0, c3 = 0;
#pragma unroll
    for (int i = 0; i < 10; i++) {
        u64 a = (u64)c0 * 0xD2511F53u, b = (u64)c2 * 0xCD9E8D57u;
        u32 n0 = (u32)(b >> 32) ^ c1 ^ k0, n2 = (u32)(a >> 32) ^ c3 ^ k1;
        c1 = (u32)b; c3 = (u32)a; c0 = n0; c2 = n2;
        k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
    }
    out[0] = c0; out[1] = c1;
}

struct Sampler {
    float top_p, tau_count; // repeats at or above tau_count again
    int top_k, window, speech_tokens;
};
#define SAMPLE_THREADS 1024
#define SAMPLE_WARPS (SAMPLE_THREADS / 32)
#define SAMPLE_PER 8 // scores of a thread
#define MAX_K 64 // and groups of sixteen threads
static_assert(SAMPLE_THREADS == 16 * MAX_K, "a group has sixteen threads");
#define NEG_INF (-__int_as_float(0x7f800000))
DEV float warp_max(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
    return v;
}
DEV double warp_sum(double v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
}
// A word of a slot's record, read here and now: the compiler moves other loads after the next `dep_wait`.
DEV int word_ahead(const void* p) {
    int v;
    asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
// Repetition-aware sampling of one row (sample.rs is the specification), and the slot's next input. At most
// SAMPLE_THREADS * SAMPLE_PER scores.
//
// Of 64 groups of threads each finds its best score. All of the top_k are at least as good as the top_k-th of these 64, and few
// others are: those that are, some 30 in all, are put in order by counting for each how many are better.
KERNEL __launch_bounds__(SAMPLE_THREADS) llm_sample(const __grid_constant__ Llm p, const __grid_constant__ Sampler d, const float* logits, int v, int ld, int* tokens, int* counts, int max_rounds) {
    extern __shared__ __align__(128) unsigned char smem[];
    float* lp = (float*)smem;
    u64* good = (u64*)(smem + ((v * 4 + 15) & ~15)); // (order of the score, -id) of those good enough
    __shared__ double redd[SAMPLE_WARPS];
    __shared__ float best[MAX_K], enough; // of each group; the top_k-th of those
    __shared__ int order[MAX_K], count;
    __shared__ __align__(16) float weight[MAX_K]; // of those; below zero: none
    __shared__ float uniform[2]; // random numbers of the two draws
    __shared__ int recent[RECENT], pos, max_len, forced, given;
    __shared__ int chosen, again, hit, last;
    const int r = blockIdx.x, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    // What a slot is at is as the round before left it, and is read while the scores are still being made.
    const int s = word_ahead(p.slots + r);
    Seq* q = p.seq + max(s, 0);
    const int round = word_ahead(counts + r), decoded = word_ahead(&q->decoded), done = word_ahead(&q->done);
    const int min_len = word_ahead(&q->min_len), within = word_ahead(&q->mask_to), spared = word_ahead(&q->spared);
    const int mask_to = decoded < min_len ? within : 0;
    // What the first warp alone needs later is read by the second, into shared memory: in registers every thread would hold it.
    if (warp == 1) {
        const int fixed = word_ahead(&q->forced), place = word_ahead(&q->pos), most = word_ahead(&q->max_len);
        const u32 k0 = word_ahead(q->key), k1 = word_ahead(q->key + 1);
        if (lane < RECENT) recent[lane] = word_ahead(q->recent + lane);
        u32 rnd[2];
        philox(k0, k1, (u32)decoded, rnd);
        if (lane < 2) uniform[lane] = ((lane ? rnd[1] : rnd[0]) >> 8) * (1.f / 16777216.f);
        if (lane == 0) {
            pos = place; max_len = most; forced = fixed;
            if (fixed > 0) given = word_ahead(p.forced + (i64)max(s, 0) * p.positions + min(decoded, fixed - 1));
        }
    }
    // The next round's inputs are made here, so nothing of it may start before this ends.
    dep_wait();
    if (s < 0) return;
    if (done) {
        if (tid == 0 && round < max_rounds) { tokens[r * max_rounds + round] = TOKEN_NONE; counts[r] = round + 1; }
        return;
    }
    if (tid < MAX_K) order[tid] = -1;
    if (tid == 0) { again = 0; chosen = -1; hit = v; last = -1; count = 0; }
    float x[SAMPLE_PER], mx = NEG_INF;
    int bad = 0;
#pragma unroll
    for (int m = 0; m < SAMPLE_PER; m++) {
        int i = tid + m * SAMPLE_THREADS;
        x[m] = i < v ? logits[(i64)r * ld + i] : NEG_INF;
    }
#pragma unroll
    for (int m = 0; m < SAMPLE_PER; m++) {
        int i = tid + m * SAMPLE_THREADS;
        if (i >= d.speech_tokens && i < mask_to && i != spared) x[m] = NEG_INF;
        bad |= x[m] != x[m];
        mx = fmaxf(mx, x[m]);
    }
#pragma unroll
    for (int o = 8; o; o >>= 1) mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, o));
    if (lane % 16 == 0) best[tid / 16] = mx;
    bad = __syncthreads_or(bad);
    if (tid < MAX_K) {
        const float own = best[tid];
        int better = 0;
#pragma unroll 8
        for (int o = 0; o < MAX_K; o++) better += best[o] > own || (best[o] == own && o < tid);
        if (better == d.top_k - 1) enough = own;
    }
    mx = warp_max(fmaxf(best[lane], best[lane + 32]));
    const bool dead = bad || mx == NEG_INF;
    // A thread's few in single precision: conversions and exponentials in double take longer than all the rest.
    float few = 0.f;
#pragma unroll
    for (int m = 0; m < SAMPLE_PER; m++) if (tid + m * SAMPLE_THREADS < v) few += expf(x[m] - mx);
    const double z = warp_sum((double)few);
    if (lane == 0) redd[warp] = z;
    __syncthreads();
    const float lz = logf((float)warp_sum(redd[lane]));
    // Where fewer than top_k scores are left all of them are good enough.
    const float least = fmaxf((enough - mx) - lz, -__int_as_float(0x7f7fffff));
#pragma unroll
    for (int m = 0; m < SAMPLE_PER; m++) {
        int i = tid + m * SAMPLE_THREADS;
        if (i >= v) continue;
        float l = (x[m] - mx) - lz;
        lp[i] = l;
        if (l >= least) good[atomicAdd(&count, 1)] = (u64)order_key(l) << 32 | (u32)~i;
    }
    __syncthreads();
    // Eight threads share the comparisons of one.
    for (int c = tid >> 3; c < (dead ? 0 : count); c += SAMPLE_THREADS / 8) {
        const u64 own = good[c];
        int rank = 0;
        for (int o = tid & 7; o < count; o += 8) rank += good[o] > own;
#pragma unroll
        for (int o = 1; o < 8; o <<= 1) rank += __shfl_xor_sync(0xffu << (tid & 24), rank, o);
        if (rank < d.top_k) order[rank] = (int)~(u32)own;
    }
    __syncthreads();
    if (warp == 0 && !dead) {
        int ids[2];
        float pr[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            ids[h] = order[lane + h * 32];
            pr[h] = ids[h] < 0 ? 0.f : expf(lp[ids[h]]);
            weight[lane + h * 32] = ids[h] < 0 ? -1.f : pr[h];
        }
        __syncwarp();
        // The sum of what comes before a lane's own in order, and of that and its own: every lane adds them up in turn.
        double run[2] = {0, 0};
        int n = 0;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int own = lane + h * 32;
            if (h * 32 >= d.top_k) break;
            float before = 0.f;
            for (int i = 0; i < min(d.top_k, h * 32 + 32); i += 4) {
                const float4 four = *(const float4*)(weight + i);
                const float w[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if (i + e < own) before += w[e];
                    if (i + e <= own) run[h] += (double)w[e];
                }
            }
            // while less than top_p is taken
            const u32 out = __ballot_sync(~0u, !(own < d.top_k && before < d.top_p && weight[own] >= 0.f));
            if (n == h * 32) n += out ? __ffs(out) - 1 : 32;
        }
        const double total = __shfl_sync(~0u, n > 32 ? run[1] : run[0], (n - 1) & 31);
        const double target = total * (double)uniform[0];
        int id = -1;
#pragma unroll
        for (int h = 1; h >= 0; h--) {
            const bool in = lane + h * 32 < n && pr[h] > 0.f;
            const u32 any = __ballot_sync(~0u, in), past = __ballot_sync(~0u, in && run[h] > target);
            // the first past the target, else the last that counts
            const int got = past ? __ffs(past) - 1 : any && id < 0 ? 31 - __clz(any) : -1;
            const int candidate = __shfl_sync(~0u, ids[h], got < 0 ? 0 : got);
            if (got >= 0) id = candidate;
        }
        const bool same = lane < min(d.window, decoded) && recent[(decoded - 1 - lane) % RECENT] == id;
        const int rep = __popc(__ballot_sync(~0u, same));
        if (lane == 0) {
            chosen = n > 0 && total > 0 ? id : -1;
            again = chosen >= 0 && !((float)rep < d.tau_count);
        }
    }
    __syncthreads();
    if (again) {
        // from everything but that id, in order of id: the thread in whose share the target falls looks for it
        const int no = chosen, n = (v + SAMPLE_THREADS - 1) / SAMPLE_THREADS, a = min(v, tid * n), b = min(v, a + n);
        double mine = 0;
        for (int i = a; i < b; i++) if (i != no) mine += exp((double)lp[i]);
        double upto = mine;
#pragma unroll
        for (int o = 1; o < 32; o <<= 1) {
            double t = __shfl_up_sync(~0u, upto, o);
            if (lane >= o) upto += t;
        }
        if (lane == 31) redd[warp] = upto;
        __syncthreads();
        double before = 0, total = 0;
        for (int w = 0; w < SAMPLE_WARPS; w++) {
            if (w < warp) before += redd[w];
            total += redd[w];
        }
        const double target = total * (double)uniform[1];
        if (mine > 0 && total > 0) {
            double run = before + (upto - mine);
            int found = v, some = -1;
            for (int i = a; i < b; i++) {
                double w = i == no ? 0 : exp((double)lp[i]);
                run += w;
                if (w > 0) { some = i; if (run > target) { found = i; break; } }
            }
            atomicMin(&hit, found);
            atomicMax(&last, some);
        }
        __syncthreads();
        if (tid == 0) chosen = hit < v ? hit : last;
        __syncthreads();
    }
    if (tid == 0) {
        int id = chosen, tok;
        if (dead || id < 0) {
            tok = TOKEN_BAD;
            q->done = 1;
        } else {
            if (forced > 0) id = given;
            if (id >= d.speech_tokens && forced == 0) {
                tok = TOKEN_END - (id - d.speech_tokens);
                q->done = 1;
            } else {
                tok = id;
                q->recent[decoded % RECENT] = id;
                q->decoded = decoded + 1;
                q->input = (u32)id | SPEECH_BIT;
                q->pos = pos + 1;
                if (decoded + 1 >= max_len || (forced > 0 && decoded + 1 >= forced) || pos + 1 >= p.positions) q->done = 1;
            }
        }
        if (round < max_rounds) { tokens[r * max_rounds + round] = tok; counts[r] = round + 1; }
    }
}
