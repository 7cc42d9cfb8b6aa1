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
#define MAX_K 64
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
// Repetition-aware sampling of one row (sample.rs is the specification), and the slot's next input. At most
// SAMPLE_THREADS * SAMPLE_PER scores.
KERNEL __launch_bounds__(SAMPLE_THREADS) llm_sample(const __grid_constant__ Llm p, const __grid_constant__ Sampler d, const float* logits, int v, int ld, int* tokens, int* counts, int max_rounds) {
    extern __shared__ __align__(128) unsigned char smem[];
    float* lp = (float*)smem;
    __shared__ float red[SAMPLE_WARPS];
    __shared__ double redd[SAMPLE_WARPS];
    __shared__ __align__(16) u64 best[SAMPLE_WARPS * MAX_K]; // (order of the score, -id), [place in its warp][warp]
    __shared__ int order[MAX_K];
    __shared__ __align__(16) float weight[MAX_K]; // of those; below zero: none
    __shared__ int chosen, again, hit, last;
    const int r = blockIdx.x, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    // What a slot is at is as the round before left it, and is read while the scores are still being made.
    const int s = __ldcg(p.slots + r);
    Seq* q = p.seq + max(s, 0);
    const int round = __ldcg(counts + r), decoded = __ldcg(&q->decoded), done = __ldcg(&q->done);
    const int mask_to = decoded < __ldcg(&q->min_len) ? __ldcg(&q->mask_to) : 0, spared = __ldcg(&q->spared);
    // The next round's inputs are made here, so nothing of it may start before this ends.
    dep_wait();
    if (s < 0) return;
    if (done) {
        __syncthreads();
        if (tid == 0 && round < max_rounds) { tokens[r * max_rounds + round] = TOKEN_NONE; counts[r] = round + 1; }
        return;
    }
    if (tid < MAX_K) order[tid] = -1;
    if (tid == 0) { again = 0; chosen = -1; hit = v; last = -1; }
    float x[SAMPLE_PER], mx = NEG_INF;
    int bad = 0;
#pragma unroll
    for (int m = 0; m < SAMPLE_PER; m++) {
        int i = tid + m * SAMPLE_THREADS;
        x[m] = NEG_INF;
        if (i < v) {
            x[m] = logits[(i64)r * ld + i];
            if (i >= d.speech_tokens && i < mask_to && i != spared) x[m] = NEG_INF;
            bad |= x[m] != x[m];
            mx = fmaxf(mx, x[m]);
        }
    }
    mx = warp_max(mx);
    if (lane == 0) red[warp] = mx;
    bad = __syncthreads_or(bad);
    mx = warp_max(red[lane]);
    const bool dead = bad || mx == NEG_INF;
    // A thread's few in single precision: conversions and exponentials in double take longer than all the rest.
    float few = 0.f;
#pragma unroll
    for (int m = 0; m < SAMPLE_PER; m++) if (tid + m * SAMPLE_THREADS < v) few += expf(x[m] - mx);
    const double z = warp_sum((double)few);
    if (lane == 0) redd[warp] = z;
    __syncthreads();
    const float lz = logf((float)warp_sum(redd[lane]));
    u32 key[SAMPLE_PER];
#pragma unroll
    for (int m = 0; m < SAMPLE_PER; m++) {
        int i = tid + m * SAMPLE_THREADS;
        key[m] = 0;
        if (i < v) {
            float l = (x[m] - mx) - lz;
            lp[i] = l;
            key[m] = order_key(l);
        }
    }
    // Each warp puts the best of its scores in order, some at a time; a score's place among all warps' is the number
    // of better ones, and it is right unless a warp's last one so far is among the top_k.
    for (int have = 0, more = 1; more;) {
        const int to = min(have ? have * 2 : 4, d.top_k);
        for (int t = have; t < to; t++) {
            u32 top = 0;
            int at = 0;
#pragma unroll
            for (int m = 0; m < SAMPLE_PER; m++) if (key[m] > top) { top = key[m]; at = m; }
            u32 all = __reduce_max_sync(~0u, top);
            u32 mine = top == all && top ? (u32)(tid + at * SAMPLE_THREADS) : 0x7fffffffu;
            u32 id = __reduce_min_sync(~0u, mine);
#pragma unroll
            for (int m = 0; m < SAMPLE_PER; m++) if (m == at && mine == id) key[m] = 0;
            if (lane == 0) best[t * SAMPLE_WARPS + warp] = (u64)all << 32 | (u32)~id;
        }
        have = to;
        __syncthreads();
        more = 0;
        for (int c = tid; c < have * SAMPLE_WARPS; c += SAMPLE_THREADS) {
            const u64 own = best[c];
            int rank = 0;
#pragma unroll 8
            for (int o = 0; o < have * SAMPLE_WARPS; o += 2) {
                ulonglong2 two = *(const ulonglong2*)(best + o);
                rank += (two.x > own) + (two.y > own);
            }
            if (own >> 32 && rank < d.top_k) {
                order[rank] = (int)~(u32)own;
                more |= have < d.top_k && c / SAMPLE_WARPS == have - 1;
            }
        }
        more = __syncthreads_or(more);
    }
    u32 rnd[2];
    philox(q->key[0], q->key[1], (u32)decoded, rnd);
    const float u0 = (rnd[0] >> 8) * (1.f / 16777216.f), u1 = (rnd[1] >> 8) * (1.f / 16777216.f);
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
        // in turn, while less than top_p is taken; eight are read at once, as each by itself would be waited for
        double total = 0, run[2] = {0, 0};
        float sum = 0.f;
        int n = 0;
        for (bool go = true; go && n < d.top_k;) {
            float w[8];
            *(float4*)w = *(const float4*)(weight + n);
            *(float4*)(w + 4) = *(const float4*)(weight + n + 4);
#pragma unroll
            for (int e = 0; e < 8; e++) {
                go = go && n < d.top_k && sum < d.top_p && w[e] >= 0.f;
                if (!go) continue;
                sum += w[e];
                total += (double)w[e];
                if (lane == n) run[0] = total;
                if (lane + 32 == n) run[1] = total;
                n++;
            }
        }
        const double target = total * (double)u0;
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
        const bool same = lane < min(d.window, decoded) && q->recent[(decoded - 1 - lane) % RECENT] == id;
        const int rep = __popc(__ballot_sync(~0u, same));
        if (lane == 0) {
            chosen = total > 0 ? id : -1;
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
        const double target = total * (double)u1;
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
            if (q->forced > 0) id = p.forced[(i64)s * p.positions + min(decoded, q->forced - 1)];
            if (id >= d.speech_tokens && q->forced == 0) {
                tok = TOKEN_END - (id - d.speech_tokens);
                q->done = 1;
            } else {
                tok = id;
                q->recent[decoded % RECENT] = id;
                q->decoded = decoded + 1;
                q->input = (u32)id | SPEECH_BIT;
                q->pos++;
                if (decoded + 1 >= q->max_len || (q->forced > 0 && decoded + 1 >= q->forced) || q->pos >= p.positions) q->done = 1;
            }
        }
        if (round < max_rounds) { tokens[r * max_rounds + round] = tok; counts[r] = round + 1; }
    }
}
