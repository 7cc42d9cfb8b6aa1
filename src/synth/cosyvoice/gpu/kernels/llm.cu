// The language model: embedding and attention over a slot's cache. Sampling is in sample.cu.
//
// HD: width of a head; GROUP: query heads that share a key head; KVH: key heads.
#ifndef HD
#define HD 64
#define GROUP 7
#define KVH 2
#endif
#define SPEECH_BIT 0x80000000u
#define RECENT 16
#define TOKEN_NONE (-1)
#define TOKEN_BAD (-2)
#define TOKEN_END (-3) // the first control id; further ones are below it

// What decoding knows about a slot; lives on the device for as long as the slot does.
struct Seq {
    int pos;          // position of the next input
    u32 input;        // the next input: an id, with SPEECH_BIT for the speech table
    int decoded;      // tokens out
    int done;
    u32 key[2];
    int min_len, max_len;
    int mask_to;      // first score past the mask before min_len
    int spared;       // a score that it leaves alone, -1: none
    int forced;       // number of forced tokens, 0: none
    int recent[RECENT]; // ring by decoded % RECENT
};

struct Llm {
    const elt* text;
    const elt* speech;
    const float2* rope; // [position][HD/2] cos, sin
    elt* cache;         // [slot][layer][2][KVH][positions][HD]
    Seq* seq;           // [slot]
    const int* forced;  // [slot][positions]
    float* x;           // residual stream [rows][hidden]
    elt* xe;            // the same, rounded
    int* row_slot;
    int* row_pos;
    const int* slots;   // decode: slot of each row, -1 for none
    const u32* ids;     // prefill: input of each row
    i64 slot_stride, layer_stride;
    int hidden, positions, rows;
    int tiled_rows;     // height of tiled activations (common.cuh), 0: rows lie one after another
};
DEV i64 place(const Llm& p, int row, int col, int width) {
    return p.tiled_rows ? tiled(p.tiled_rows, row, col) : (i64)row * width + col;
}

// One row each: looks up the input and says where its key and value go.
KERNEL llm_embed(const __grid_constant__ Llm p, int prefill) {
    // What comes after may look at slots and positions before its own wait: they must be those of this round.
    dep_wait();
    dep_go();
    int r = blockIdx.x;
    u32 id;
    if (prefill) {
        id = p.ids[r];
    } else {
        int s = p.slots[r];
        if (threadIdx.x == 0) { p.row_slot[r] = s; p.row_pos[r] = s < 0 ? 0 : p.seq[s].pos; }
        id = s < 0 ? SPEECH_BIT : p.seq[s].input;
    }
    const elt* src = (id & SPEECH_BIT ? p.speech : p.text) + (i64)(id & ~SPEECH_BIT) * p.hidden;
    for (int i = threadIdx.x; i < p.hidden; i += blockDim.x) {
        elt v = src[i];
        p.x[(i64)r * p.hidden + i] = to_f(v);
        p.xe[place(p, r, i, p.hidden)] = v;
    }
}

// Rotates the pair (i, i + HD/2) of a head.
DEV float2 rotate(float a, float b, float2 cs) { return make_float2(a * cs.x - b * cs.y, b * cs.x + a * cs.y); }

// Keys and values of many positions into the cache, before any of them attends.
KERNEL llm_append(const __grid_constant__ Llm p, const float* qkv, int layer) {
    dep_go();
    dep_wait();
    int r = blockIdx.x, s = p.row_slot[r], pos = p.row_pos[r];
    if (s < 0) return;
    const float* k = qkv + (i64)r * (GROUP + 2) * KVH * HD + GROUP * KVH * HD;
    elt* base = p.cache + s * p.slot_stride + layer * p.layer_stride;
    for (int i = threadIdx.x; i < KVH * HD / 2; i += blockDim.x) {
        int h = i / (HD / 2), j = i % (HD / 2);
        float2 v = rotate(k[h * HD + j], k[h * HD + j + HD / 2], p.rope[(i64)pos * (HD / 2) + j]);
        elt* dst = base + ((i64)h * p.positions + pos) * HD;
        dst[j] = to_e(v.x);
        dst[j + HD / 2] = to_e(v.y);
    }
    for (int i = threadIdx.x; i < KVH * HD; i += blockDim.x)
        base[((i64)(KVH + i / HD) * p.positions + pos) * HD + i % HD] = to_e(k[KVH * HD + i]);
}

// The last row of each prefix, of which there are as many as slots: its residual and its projection, to rows like a round's.
KERNEL llm_last(const __grid_constant__ Llm p, const float* x, const float* qkv, float* own, const int* last) {
    // As llm_embed: attention reads slots, positions and the cache before its own wait.
    dep_wait();
    dep_go();
    const int r = blockIdx.x, width = (GROUP + 2) * KVH * HD, s = p.slots[r];
    const i64 from = last[r];
    if (threadIdx.x == 0) { p.row_slot[r] = s; p.row_pos[r] = s < 0 ? 0 : p.seq[s].pos; }
    for (int i = threadIdx.x; i < p.hidden; i += blockDim.x) p.x[(i64)r * p.hidden + i] = x[from * p.hidden + i];
    for (int i = threadIdx.x; i < width; i += blockDim.x) own[(i64)r * width + i] = qkv[from * width + i];
}

#if ELT == 0
// One position of one key head against its past. A key is read by LPK lanes, 8 values each; all GROUP query heads
// use what was read. Warps and lane groups take keys in turn, so the order of sums depends on the position alone.
#define WARPS 8
#define AT_ONCE 4 // keys of a lane group between two updates of the running maximum
#define LPK (HD / 8)
#define KPW (32 / LPK)
DEV void attend(const Llm& p, const float* qkv, elt* out, int layer, int append) {
    __shared__ float q_s[GROUP][HD];
    __shared__ float m_s[WARPS][GROUP], l_s[WARPS][GROUP];
    __shared__ float o_s[WARPS][GROUP][HD];
    __shared__ __align__(16) elt kv_s[2][HD];
    dep_go();
    dep_wait();
    const int r = blockIdx.x, h = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int s = p.row_slot[r], pos = p.row_pos[r];
    if (s < 0) return;
    const float* row = qkv + (i64)r * (GROUP + 2) * KVH * HD;
    elt* kc = p.cache + s * p.slot_stride + layer * p.layer_stride + (i64)h * p.positions * HD;
    elt* vc = kc + (i64)KVH * p.positions * HD;
    const float scale = rsqrtf((float)HD);
    for (int i = threadIdx.x; i < GROUP * HD / 2; i += blockDim.x) {
        int g = i / (HD / 2), j = i % (HD / 2);
        const float* q = row + (h * GROUP + g) * HD;
        float2 v = rotate(q[j], q[j + HD / 2], p.rope[(i64)pos * (HD / 2) + j]);
        q_s[g][j] = v.x * scale;
        q_s[g][j + HD / 2] = v.y * scale;
    }
    if (append && threadIdx.x >= blockDim.x - HD) {
        int i = threadIdx.x - (blockDim.x - HD);
        const float* k = row + GROUP * KVH * HD + h * HD;
        if (i < HD / 2) {
            float2 v = rotate(k[i], k[i + HD / 2], p.rope[(i64)pos * (HD / 2) + i]);
            elt a = to_e(v.x), b = to_e(v.y);
            kv_s[0][i] = a; kv_s[0][i + HD / 2] = b;
            kc[(i64)pos * HD + i] = a; kc[(i64)pos * HD + i + HD / 2] = b;
        }
        elt v = to_e(k[KVH * HD + i]);
        kv_s[1][i] = v;
        vc[(i64)pos * HD + i] = v;
    }
    __syncthreads();
    const int sub = lane % LPK, grp = lane / LPK;
    float m[GROUP], l[GROUP], o[GROUP][8];
    // queries stay in shared memory: 7 heads of them and their sums would not fit the registers
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        m[g] = -1e30f; l[g] = 0.f;
#pragma unroll
        for (int e = 0; e < 8; e++) o[g][e] = 0.f;
    }
    for (int j0 = warp * KPW * AT_ONCE; j0 <= pos; j0 += WARPS * KPW * AT_ONCE) {
        Eight kr[AT_ONCE], vr[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            int j = min(j0 + u * KPW + grp, pos);
            bool fresh = append && j == pos;
            kr[u] = load_raw(fresh ? kv_s[0] + sub * 8 : kc + (i64)j * HD + sub * 8);
            vr[u] = load_raw(fresh ? kv_s[1] + sub * 8 : vc + (i64)j * HD + sub * 8);
        }
        float d[AT_ONCE][GROUP];
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            float k[8];
            expand(kr[u], k);
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                const float4* q = (const float4*)(q_s[g] + sub * 8);
                float4 a = q[0], b = q[1];
                d[u][g] = a.x * k[0] + a.y * k[1] + a.z * k[2] + a.w * k[3] + b.x * k[4] + b.y * k[5] + b.z * k[6] + b.w * k[7];
            }
        }
#pragma unroll
        for (int w = LPK / 2; w; w >>= 1)
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++)
#pragma unroll
                for (int g = 0; g < GROUP; g++) d[u][g] += __shfl_xor_sync(~0u, d[u][g], w);
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            float n = m[g];
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
                if (j0 + u * KPW + grp > pos) d[u][g] = -1e30f;
                n = fmaxf(n, d[u][g]);
            }
            float c = __expf(m[g] - n);
            m[g] = n;
            l[g] *= c;
#pragma unroll
            for (int t = 0; t < 8; t++) o[g][t] *= c;
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
                d[u][g] = d[u][g] > -1e29f ? __expf(d[u][g] - n) : 0.f;
                l[g] += d[u][g];
            }
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            float v[8];
            expand(vr[u], v);
#pragma unroll
            for (int g = 0; g < GROUP; g++)
#pragma unroll
                for (int t = 0; t < 8; t++) o[g][t] = fmaf(d[u][g], v[t], o[g][t]);
        }
    }
    // lane groups of a warp, then warps
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
#pragma unroll
        for (int w = LPK; w < 32; w <<= 1) {
            float m2 = __shfl_xor_sync(~0u, m[g], w), l2 = __shfl_xor_sync(~0u, l[g], w);
            float n = fmaxf(m[g], m2), c = __expf(m[g] - n), c2 = __expf(m2 - n);
            l[g] = l[g] * c + l2 * c2;
            m[g] = n;
#pragma unroll
            for (int t = 0; t < 8; t++) {
                float o2 = __shfl_xor_sync(~0u, o[g][t], w);
                o[g][t] = o[g][t] * c + o2 * c2;
            }
        }
        if (grp == 0) {
            if (sub == 0) { m_s[warp][g] = m[g]; l_s[warp][g] = l[g]; }
#pragma unroll
            for (int t = 0; t < 8; t++) o_s[warp][g][sub * 8 + t] = o[g][t];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP * HD; i += blockDim.x) {
        int g = i / HD, d = i % HD;
        float n = -1e30f;
        for (int w = 0; w < WARPS; w++) n = fmaxf(n, m_s[w][g]);
        float a = 0.f, z = 0.f;
        for (int w = 0; w < WARPS; w++) { float c = __expf(m_s[w][g] - n); z += c * l_s[w][g]; a += c * o_s[w][g][d]; }
        out[(i64)r * GROUP * KVH * HD + (h * GROUP + g) * HD + d] = to_e(a / z);
    }
}
KERNEL __launch_bounds__(WARPS * 32) llm_attend(const __grid_constant__ Llm p, const float* qkv, elt* out, int layer) { attend(p, qkv, out, layer, 1); }
KERNEL __launch_bounds__(WARPS * 32) llm_attend_prefix(const __grid_constant__ Llm p, const float* qkv, elt* out, int layer) { attend(p, qkv, out, layer, 0); }
#else
// One position of one key head against its past, or two neighbours (PAIR). Each of the warps takes 16 keys in turn, so the
// order of sums depends on the position alone.
#define WARPS 8
#define CPR (HD / 8)
#define TILE_BYTES (16 * HD * 2)
#define CAN_PAIR (GROUP <= 8)
#define ONES (ELT == 1 ? 0x3f803f80u : 0x3c003c00u)
DEV u32 swz(int r, int q) { return r * (HD * 2) + ((q ^ (r & (CPR - 1))) << 4); }
// What a warp does with its tiles, in two ways that give the same bits: weights are added up by an MMA, as values are.
//
// Queries as the rows of an MMA: the query heads that share the key head, eight a position, of which GROUP count, or sixteen.
template <bool HIGH> struct QueryRows { // HIGH: whether the upper eight count
    // Keys and values of a tile are waited for together. ROWS by LD: what a warp leaves, laid out so that eight rows use all banks.
    enum { SPLIT = 0, ROWS = 16, LD = HD + 8 };
    uint4 q[HD / 16], weights;
    float o[HD / 8][4] = {}, l[4] = {}, m = -1e30f, m8 = -1e30f, c, c8; // rows of this thread: lane / 4 and lane / 4 + 8
    DEV void queries(u32 q_s, int lane) {
#pragma unroll
        for (int k = 0; k < HD / 16; k++) ldm4(q_s + swz(lane & 15, k * 2 + (lane >> 4)), q[k].x, q[k].y, q[k].z, q[k].w);
    }
    DEV void keys(u32 ks, int lane, int j0, int pos, int last) {
        float sc[2][4] = {};
#pragma unroll
        for (int k = 0; k < HD / 16; k++) {
            u32 b0, b1, b2, b3;
            ldm4(ks + swz((lane & 7) + ((lane >> 4) << 3), k * 2 + ((lane >> 3) & 1)), b0, b1, b2, b3);
            mma(sc[0], q[k], b0, b1);
            mma(sc[1], q[k], b2, b3);
        }
        float n = m, n8 = m8;
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (j0 + t * 8 + (lane & 3) * 2 + (e & 1) > (e < 2 ? pos : last)) sc[t][e] = -1e30f;
                if (e < 2) n = fmaxf(n, sc[t][e]); else if (HIGH) n8 = fmaxf(n8, sc[t][e]);
            }
        n = fmaxf(n, __shfl_xor_sync(~0u, n, 1)); n = fmaxf(n, __shfl_xor_sync(~0u, n, 2));
        if (HIGH) { n8 = fmaxf(n8, __shfl_xor_sync(~0u, n8, 1)); n8 = fmaxf(n8, __shfl_xor_sync(~0u, n8, 2)); }
        c = exp2f(m - n); c8 = HIGH ? exp2f(m8 - n8) : 0.f;
        m = n; m8 = n8;
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) sc[t][e] = e < 2 ? exp2f(sc[t][e] - n) : HIGH ? exp2f(sc[t][e] - n8) : 0.f;
        weights = make_uint4(pack2(sc[0][0], sc[0][1]), pack2(sc[0][2], sc[0][3]), pack2(sc[1][0], sc[1][1]), pack2(sc[1][2], sc[1][3]));
    }
    DEV void values(u32 vs, int lane) {
        l[0] *= c; l[2] *= c8;
        mma(l, weights, ONES, ONES);
#pragma unroll
        for (int d = 0; d < HD / 8; d += 2) {
            u32 b0, b1, b2, b3;
            ldm4t(vs + swz((lane & 7) + (((lane >> 3) & 1) << 3), d + (lane >> 4)), b0, b1, b2, b3);
            o[d][0] *= c; o[d][1] *= c; o[d][2] *= c8; o[d][3] *= c8;
            o[d + 1][0] *= c; o[d + 1][1] *= c; o[d + 1][2] *= c8; o[d + 1][3] *= c8;
            mma(o[d], weights, b0, b1);
            mma(o[d + 1], weights, b2, b3);
        }
    }
    // This warp's sums, and its maxima and weights, to those of all warps.
    DEV void leave(float* o_s, float* m_s, float* l_s, int lane) {
#pragma unroll
        for (int d = 0; d < HD / 8; d++) {
            float* t = o_s + (lane >> 2) * LD + d * 8 + (lane & 3) * 2;
            *(float2*)t = make_float2(o[d][0], o[d][1]);
            if (HIGH) *(float2*)(t + 8 * LD) = make_float2(o[d][2], o[d][3]);
        }
        if ((lane & 3) == 0) {
            m_s[lane >> 2] = m; l_s[lane >> 2] = l[0];
            m_s[(lane >> 2) + 8] = m8; l_s[(lane >> 2) + 8] = l[2];
        }
    }
};
// Keys, then inputs of a head, as the rows and eight queries as the columns: half of the MMAs and of the registers where no
// more than eight count, but more steps that wait for each other.
struct KeyRows {
    // Keys and values of a tile are waited for, and replaced by the next, apart. ROWS and LD as above: a warp's lanes use all banks.
    enum { SPLIT = 1, ROWS = 8, LD = HD + 4 };
    // of the queries 2 * (lane % 4) and the next
    float o[HD / 16][4] = {}, l[4] = {}, m[2] = {-1e30f, -1e30f}, c[2];
    u32 q[HD / 8], weights[2];
    DEV void queries(u32 q_s, int lane) {
#pragma unroll
        for (int k = 0; k < HD / 8; k += 4) {
            u32 b[4];
            ldm4(q_s + swz(lane & 7, (k + (lane >> 3)) & (CPR - 1)), b[0], b[1], b[2], b[3]);
#pragma unroll
            for (int e = 0; e < 4 && k + e < HD / 8; e++) q[k + e] = b[e];
        }
    }
    DEV void keys(u32 ks, int lane, int j0, int pos, int) {
        float sc[4] = {};
#pragma unroll
        for (int k = 0; k < HD / 16; k++) {
            uint4 a;
            ldm4(ks + swz(lane & 15, k * 2 + (lane >> 4)), a.x, a.y, a.z, a.w);
            mma(sc, a, q[2 * k], q[2 * k + 1]);
        }
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (j0 + (lane >> 2) + e / 2 * 8 > pos) sc[e] = -1e30f;
        float n[2] = {fmaxf(m[0], fmaxf(sc[0], sc[2])), fmaxf(m[1], fmaxf(sc[1], sc[3]))};
#pragma unroll
        for (int by = 4; by < 32; by *= 2) {
            n[0] = fmaxf(n[0], __shfl_xor_sync(~0u, n[0], by));
            n[1] = fmaxf(n[1], __shfl_xor_sync(~0u, n[1], by));
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            c[e] = exp2f(m[e] - n[e]);
            m[e] = n[e];
            sc[e] = exp2f(sc[e] - n[e]);
            sc[e + 2] = exp2f(sc[e + 2] - n[e]);
        }
        weights[0] = transposed(pack2(sc[0], sc[1]));
        weights[1] = transposed(pack2(sc[2], sc[3]));
    }
    DEV void values(u32 vs, int lane) {
        l[0] *= c[0]; l[1] *= c[1];
        mma(l, make_uint4(ONES, ONES, ONES, ONES), weights[0], weights[1]);
#pragma unroll
        for (int d = 0; d < HD / 16; d++) {
            uint4 a;
            ldm4t(vs + swz((lane & 7) + ((lane >> 4) << 3), d * 2 + ((lane >> 3) & 1)), a.x, a.y, a.z, a.w);
#pragma unroll
            for (int e = 0; e < 4; e++) o[d][e] *= c[e & 1];
            mma(o[d], a, weights[0], weights[1]);
        }
    }
    DEV void leave(float* o_s, float* m_s, float* l_s, int lane) {
        const int own = (lane & 3) * 2;
#pragma unroll
        for (int d = 0; d < HD / 16; d++)
#pragma unroll
            for (int e = 0; e < 4; e++) o_s[(own + (e & 1)) * LD + d * 16 + e / 2 * 8 + (lane >> 2)] = o[d][e];
        if (lane < 4) {
            m_s[own] = m[0]; l_s[own] = l[0];
            m_s[own + 1] = m[1]; l_s[own + 1] = l[1];
        }
    }
};
// RING: tiles of keys and values a warp has in flight or in use, [warp][RING][keys, values] in shared memory. `append`: the
// position's own key and value are put into the cache; all else that is read was there before the round, so that it is
// fetched while the kernels before are still running.
template <class Rows, int RING, bool PAIR> DEV void attend(const Llm& p, int r, int h, int s, int pos, const float* qkv, elt* out, int layer, int append) {
    extern __shared__ __align__(128) unsigned char smem[];
    __shared__ __align__(128) unsigned char q_s[TILE_BYTES];
    __shared__ float m_s[WARPS][16], l_s[WARPS][16];
    auto kv_s = (unsigned char(*)[RING][2][TILE_BYTES])smem;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, last = pos + PAIR;
    const float* row = qkv + (i64)r * (GROUP + 2) * KVH * HD;
    elt* kc = p.cache + s * p.slot_stride + layer * p.layer_stride + (i64)h * p.positions * HD;
    elt* vc = kc + (i64)KVH * p.positions * HD;
    const u32 kb = smem_addr(kv_s[warp]);
    auto fetch = [&](const elt* from, int j0, u32 to) {
#pragma unroll
        for (int i = lane; i < 16 * CPR; i += 32) {
            int rr = i / CPR, q = i % CPR, j = j0 + rr;
            bool ok = j <= last && !(append && j == pos);
            cp16(to + swz(rr, q), from + (ok ? (i64)j * HD + q * 8 : 0), ok);
        }
    };
    const int step = WARPS * 16, first = warp * 16;
#pragma unroll
    for (int i = 0; i < RING; i++) {
        const int j0 = first + i * step;
        const u32 to = kb + i * 2 * TILE_BYTES;
        if (j0 <= last) fetch(kc, j0, to);
        if (Rows::SPLIT) cp_commit();
        if (j0 <= last) fetch(vc, j0, to + TILE_BYTES);
        cp_commit();
    }
    // A thread turns a pair of a query, or two; what it turns them by was there before. Rows that are no head are zero.
    constexpr int PAIRS = HD / 2, QUERIES = (PAIR + 1) * GROUP * PAIRS, EACH = (QUERIES + WARPS * 32 - 1) / (WARPS * 32);
    float2 turn[EACH];
#pragma unroll
    for (int u = 0; u < EACH; u++) {
        const int i = min((int)threadIdx.x + u * WARPS * 32, QUERIES - 1);
        turn[u] = p.rope[(pos + i / (GROUP * PAIRS)) * PAIRS + i % PAIRS];
    }
    for (int i = threadIdx.x; i < 16 * CPR; i += WARPS * 32)
        if ((PAIR ? i / CPR & 7 : i / CPR) >= GROUP) *(uint4*)(q_s + swz(i / CPR, i % CPR)) = make_uint4(0, 0, 0, 0);
    if (append) dep_wait();
    // The new position's own key and value, asked for together with the query by the warp whose tile it is in.
    constexpr int OWN = (HD / 2 + 31) / 32;
    float own_k[OWN][2], own_v[OWN][2];
    float2 own_turn[OWN];
    if (append && (pos >> 4) % WARPS == warp) {
        const float* k = row + GROUP * KVH * HD + h * HD;
#pragma unroll
        for (int u = 0; u < OWN; u++) {
            const int i = min(lane + 32 * u, HD / 2 - 1);
            own_k[u][0] = k[i];
            own_k[u][1] = k[i + HD / 2];
            own_v[u][0] = k[KVH * HD + i];
            own_v[u][1] = k[KVH * HD + i + HD / 2];
            own_turn[u] = p.rope[(i64)pos * (HD / 2) + i];
        }
    }
    const float scale = rsqrtf((float)HD) * 1.4426950408889634f;
    // All are asked for before one is turned.
    float2 query[EACH];
#pragma unroll
    for (int u = 0; u < EACH; u++) {
        const int i = min((int)threadIdx.x + u * WARPS * 32, QUERIES - 1), second = i / (GROUP * PAIRS), at = i % (GROUP * PAIRS);
        const float* q = row + second * (GROUP + 2) * KVH * HD + (h * GROUP + at / PAIRS) * HD + at % PAIRS;
        query[u] = make_float2(q[0], q[PAIRS]);
    }
#pragma unroll
    for (int u = 0; u < EACH; u++) {
        const int i = threadIdx.x + u * WARPS * 32, at = i % (GROUP * PAIRS), g = i / (GROUP * PAIRS) * 8 + at / PAIRS, j = at % PAIRS;
        const float2 v = rotate(query[u].x, query[u].y, turn[u]);
        if (i >= QUERIES) break;
        *(elt*)(q_s + swz(g, j >> 3) + (j & 7) * 2) = to_e(v.x * scale);
        *(elt*)(q_s + swz(g, (j + PAIRS) >> 3) + (j & 7) * 2) = to_e(v.y * scale);
    }
    __syncthreads();
    Rows rows;
    rows.queries(smem_addr(q_s), lane);
    // Copies that may be under way while the oldest is used.
    constexpr int BEHIND = Rows::SPLIT ? 2 * RING - 1 : RING - 1;
    int buf = 0;
    for (int j0 = first; j0 <= last; j0 += step) {
        const u32 ks = kb + buf * 2 * TILE_BYTES, vs = ks + TILE_BYTES;
        const int next = j0 + RING * step;
        const bool owns = append && pos - j0 < 16;
        cp_wait<BEHIND>();
        if (Rows::SPLIT && owns) cp_wait<BEHIND - Rows::SPLIT>();
        __syncwarp();
        if (owns) {
            // the new position itself: stored, and put where the others were copied to
            unsigned char *kt = kv_s[warp][buf][0], *vt = kv_s[warp][buf][1];
            const int rr = pos - j0;
#pragma unroll
            for (int u = 0; u < OWN; u++) {
                const int i = lane + 32 * u, far = i + HD / 2;
                if (i >= HD / 2) break;
                const float2 v = rotate(own_k[u][0], own_k[u][1], own_turn[u]);
                const elt a = to_e(v.x), b = to_e(v.y), c = to_e(own_v[u][0]), d = to_e(own_v[u][1]);
                kc[(i64)pos * HD + i] = a; kc[(i64)pos * HD + far] = b;
                vc[(i64)pos * HD + i] = c; vc[(i64)pos * HD + far] = d;
                *(elt*)(kt + swz(rr, i >> 3) + (i & 7) * 2) = a;
                *(elt*)(kt + swz(rr, far >> 3) + (far & 7) * 2) = b;
                *(elt*)(vt + swz(rr, i >> 3) + (i & 7) * 2) = c;
                *(elt*)(vt + swz(rr, far >> 3) + (far & 7) * 2) = d;
            }
            __syncwarp();
        }
        rows.keys(ks, lane, j0, pos, last);
        if (Rows::SPLIT) {
            __syncwarp();
            if (next <= last) fetch(kc, next, ks);
            cp_commit();
            cp_wait<BEHIND>();
            __syncwarp();
        }
        rows.values(vs, lane);
        __syncwarp();
        if (!Rows::SPLIT && next <= last) fetch(kc, next, ks);
        if (next <= last) fetch(vc, next, vs);
        cp_commit();
        buf = buf == RING - 1 ? 0 : buf + 1;
    }
    __syncthreads();
    // the warps' sums where their keys were: [warp][ROWS][LD]
    constexpr int LD = Rows::LD;
    float* o_s = (float*)kv_s;
    rows.leave(o_s + warp * Rows::ROWS * LD, m_s[warp], l_s[warp], lane);
    __syncthreads();
#pragma unroll
    for (int u = 0; u < EACH; u++) {
        const int i = threadIdx.x + u * WARPS * 32, second = i / (GROUP * PAIRS), at = i % (GROUP * PAIRS), g = second * 8 + at / PAIRS, d = at % PAIRS * 2;
        if (i >= QUERIES) break;
        float n = -1e30f, z = 0.f;
        float2 a = make_float2(0.f, 0.f);
#pragma unroll
        for (int w = 0; w < WARPS; w++) n = fmaxf(n, m_s[w][g]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float c = exp2f(m_s[w][g] - n);
            const float2 v = *(const float2*)(o_s + (w * Rows::ROWS + g) * LD + d);
            z += c * l_s[w][g];
            a.x += c * v.x;
            a.y += c * v.y;
        }
        store2(out + place(p, r + second, h * GROUP * HD + at * 2, GROUP * KVH * HD), a.x / z, a.y / z);
    }
}
typedef QueryRows<(GROUP > 8)> OneRow;
// A round's rows, each in a slot of its own.
template <class Rows, int RING> DEV void attend_round(const Llm& p, const float* qkv, elt* out, int layer) {
    dep_go();
    const int s = __ldcg(p.slots + blockIdx.x);
    if (s < 0) { dep_wait(); return; }
    attend<Rows, RING, false>(p, blockIdx.x, blockIdx.y, s, __ldcg(&p.seq[s].pos), qkv, out, layer, 1);
}
KERNEL __launch_bounds__(WARPS * 32, 2) llm_attend(const __grid_constant__ Llm p, const float* qkv, elt* out, int layer) { attend_round<OneRow, 2>(p, qkv, out, layer); }
// for as many rows as fit with three blocks a multiprocessor, and not with two
KERNEL __launch_bounds__(WARPS * 32, 3) llm_attend_three(const __grid_constant__ Llm p, const float* qkv, elt* out, int layer) { attend_round<OneRow, 2>(p, qkv, out, layer); }
#if GROUP <= 8
// the same with four
KERNEL __launch_bounds__(WARPS * 32, 4) llm_attend_four(const __grid_constant__ Llm p, const float* qkv, elt* out, int layer) { attend_round<KeyRows, 1>(p, qkv, out, layer); }
#endif
// for few rows: a block has a multiprocessor to itself
KERNEL __launch_bounds__(WARPS * 32) llm_attend_deep(const __grid_constant__ Llm p, const float* qkv, elt* out, int layer) { attend_round<OneRow, 4>(p, qkv, out, layer); }
// Prefixes, whose keys and values are in the cache: two rows a block, most of which are neighbours.
KERNEL __launch_bounds__(WARPS * 32, 2) llm_attend_prefix(const __grid_constant__ Llm p, const float* qkv, elt* out, int layer) {
    dep_go();
    dep_wait();
    const int r = 2 * blockIdx.x, rows = min(2, p.rows - r), s = p.row_slot[r], pos = p.row_pos[r];
    if (s < 0) return; // idle, as all that follow
    if (CAN_PAIR && rows == 2 && p.row_slot[r + 1] == s && p.row_pos[r + 1] == pos + 1) {
        attend<QueryRows<true>, 2, CAN_PAIR>(p, r, blockIdx.y, s, pos, qkv, out, layer, 0);
        return;
    }
#pragma unroll 1
    for (int i = r; i < r + rows && p.row_slot[i] >= 0; i++) {
        attend<OneRow, 2, false>(p, i, blockIdx.y, p.row_slot[i], p.row_pos[i], qkv, out, layer, 0);
        __syncthreads();
    }
}
#endif
