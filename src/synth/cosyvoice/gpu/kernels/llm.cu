// The language model: embedding, attention over a slot's cache, and drawing.
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
#define TOKEN_END (-3)

// What decoding knows about a slot; lives on the device for as long as the slot does.
struct Seq {
    int pos;          // position of the next input
    u32 input;        // the next input: an id, with SPEECH_BIT for the speech table
    int decoded;      // tokens out
    int done;
    u32 key[2];
    int min_len, max_len;
    int mask_to;      // first score past the mask before min_len
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

#if ELT == 0
// One position of one key head against its past. A key is read by LPK lanes, 8 values each; all GROUP query heads
// use what was read. Warps and lane groups take keys in turn, so the order of sums depends on the position alone.
#define WARPS 8
#define AT_ONCE 4 // keys of a lane group between two updates of the running maximum
#define LPK (HD / 8)
#define KPW (32 / LPK)
KERNEL __launch_bounds__(WARPS * 32) llm_attend(const __grid_constant__ Llm p, const float* qkv, elt* out, int layer, int append) {
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
#else
// One position of one key head against its past. The query heads that share the key head are the rows of a product
// (16, of which GROUP count); each of the warps takes 16 keys in turn, so the order of sums depends on the position
// alone.
#define WARPS 8
#define CPR (HD / 8)
#define TILE_BYTES (16 * HD * 2)
DEV u32 swz(int r, int q) { return r * (HD * 2) + ((q ^ (r & (CPR - 1))) << 4); }
// RING: tiles of keys and values a warp has under way or in use. While decoding, all but the position itself was
// there before the round, so that it is fetched while the products before are still running.
template <int RING> DEV void attend(const Llm& p, const float* qkv, elt* out, int layer, int append) {
    __shared__ __align__(128) unsigned char q_s[TILE_BYTES];
    extern __shared__ __align__(128) unsigned char smem[];
    auto kv_s = (unsigned char(*)[RING][2][TILE_BYTES])smem; // [warp][buffer][keys, values]
    __shared__ float m_s[WARPS][16], l_s[WARPS][16];
    dep_go();
    const int r = blockIdx.x, h = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int s, pos = 0;
    if (append) {
        s = __ldcg(p.slots + r);
        if (s >= 0) pos = __ldcg(&p.seq[s].pos);
    } else {
        dep_wait();
        s = p.row_slot[r];
        pos = p.row_pos[r];
    }
    if (s < 0) { dep_wait(); return; }
    const float* row = qkv + (i64)r * (GROUP + 2) * KVH * HD;
    elt* kc = p.cache + s * p.slot_stride + layer * p.layer_stride + (i64)h * p.positions * HD;
    elt* vc = kc + (i64)KVH * p.positions * HD;
    const u32 kb = smem_addr(kv_s[warp]);
    auto fetch = [&](int j0, int buf) {
#pragma unroll
        for (int i = lane; i < 16 * CPR; i += 32) {
            int rr = i / CPR, q = i % CPR, j = j0 + rr;
            bool ok = j <= pos && !(append && j == pos);
            i64 off = ok ? (i64)j * HD + q * 8 : 0;
            cp16(kb + buf * 2 * TILE_BYTES + swz(rr, q), kc + off, ok);
            cp16(kb + buf * 2 * TILE_BYTES + TILE_BYTES + swz(rr, q), vc + off, ok);
        }
    };
    const int step = WARPS * 16, first = warp * 16;
#pragma unroll
    for (int i = 0; i < RING - 1; i++) {
        if (first + i * step <= pos) fetch(first + i * step, i);
        cp_commit();
    }
    if (append) dep_wait();
    const float scale = rsqrtf((float)HD) * 1.4426950408889634f;
    for (int i = threadIdx.x; i < 16 * HD / 2; i += WARPS * 32) {
        int g = i / (HD / 2), j = i % (HD / 2);
        float2 v = make_float2(0.f, 0.f);
        if (g < GROUP) {
            const float* q = row + (h * GROUP + g) * HD;
            v = rotate(q[j], q[j + HD / 2], p.rope[(i64)pos * (HD / 2) + j]);
        }
        *(elt*)(q_s + swz(g, j >> 3) + (j & 7) * 2) = to_e(v.x * scale);
        *(elt*)(q_s + swz(g, (j + HD / 2) >> 3) + (j & 7) * 2) = to_e(v.y * scale);
    }
    __syncthreads();
    uint4 qf[HD / 16];
#pragma unroll
    for (int k = 0; k < HD / 16; k++)
        ldm4(smem_addr(q_s) + swz(lane & 15, k * 2 + (lane >> 4)), qf[k].x, qf[k].y, qf[k].z, qf[k].w);
    float o[HD / 8][4] = {}, m = -1e30f, l = 0.f; // rows of this thread: lane / 4, and the unused lane / 4 + 8
    float m8 = -1e30f, l8 = 0.f;
    int buf = 0;
    for (int j0 = first, next = RING - 1; j0 <= pos; j0 += step) {
        if (j0 + (RING - 1) * step <= pos) fetch(j0 + (RING - 1) * step, next);
        cp_commit();
        cp_wait<RING - 1>();
        __syncwarp();
        const u32 ks = kb + buf * 2 * TILE_BYTES, vs = ks + TILE_BYTES;
        if (append && pos - j0 < 16) {
            // the new position itself: stored, and put where the others were copied to
            const float* k = row + GROUP * KVH * HD + h * HD;
            unsigned char *kt = kv_s[warp][buf][0], *vt = kv_s[warp][buf][1];
            int rr = pos - j0;
            for (int i = lane; i < HD / 2; i += 32) {
                float2 v = rotate(k[i], k[i + HD / 2], p.rope[(i64)pos * (HD / 2) + i]);
                elt a = to_e(v.x), b = to_e(v.y);
                kc[(i64)pos * HD + i] = a; kc[(i64)pos * HD + i + HD / 2] = b;
                *(elt*)(kt + swz(rr, i >> 3) + (i & 7) * 2) = a;
                *(elt*)(kt + swz(rr, (i + HD / 2) >> 3) + (i & 7) * 2) = b;
            }
            for (int i = lane; i < HD; i += 32) {
                elt v = to_e(k[KVH * HD + i]);
                vc[(i64)pos * HD + i] = v;
                *(elt*)(vt + swz(rr, i >> 3) + (i & 7) * 2) = v;
            }
            __syncwarp();
        }
        float sc[2][4] = {};
#pragma unroll
        for (int k = 0; k < HD / 16; k++) {
            u32 b0, b1, b2, b3;
            ldm4(ks + swz((lane & 7) + ((lane >> 4) << 3), k * 2 + ((lane >> 3) & 1)), b0, b1, b2, b3);
            mma(sc[0], qf[k], b0, b1);
            mma(sc[1], qf[k], b2, b3);
        }
        float n = m, n8 = m8;
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (j0 + t * 8 + (lane & 3) * 2 + (e & 1) > pos) sc[t][e] = -1e30f;
                if (e < 2) n = fmaxf(n, sc[t][e]); else n8 = fmaxf(n8, sc[t][e]);
            }
        n = fmaxf(n, __shfl_xor_sync(~0u, n, 1)); n = fmaxf(n, __shfl_xor_sync(~0u, n, 2));
        n8 = fmaxf(n8, __shfl_xor_sync(~0u, n8, 1)); n8 = fmaxf(n8, __shfl_xor_sync(~0u, n8, 2));
        float c = exp2f(m - n), c8 = exp2f(m8 - n8);
        m = n; m8 = n8;
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) sc[t][e] = exp2f(sc[t][e] - (e < 2 ? n : n8));
        l = l * c + (sc[0][0] + sc[0][1] + sc[1][0] + sc[1][1]);
        l8 = l8 * c8 + (sc[0][2] + sc[0][3] + sc[1][2] + sc[1][3]);
        uint4 pf = make_uint4(pack2(sc[0][0], sc[0][1]), pack2(sc[0][2], sc[0][3]), pack2(sc[1][0], sc[1][1]), pack2(sc[1][2], sc[1][3]));
#pragma unroll
        for (int d = 0; d < HD / 8; d += 2) {
            u32 b0, b1, b2, b3;
            ldm4t(vs + swz((lane & 7) + (((lane >> 3) & 1) << 3), d + (lane >> 4)), b0, b1, b2, b3);
            o[d][0] *= c; o[d][1] *= c; o[d][2] *= c8; o[d][3] *= c8;
            o[d + 1][0] *= c; o[d + 1][1] *= c; o[d + 1][2] *= c8; o[d + 1][3] *= c8;
            mma(o[d], pf, b0, b1);
            mma(o[d + 1], pf, b2, b3);
        }
        __syncwarp();
        buf = buf == RING - 1 ? 0 : buf + 1;
        next = next == RING - 1 ? 0 : next + 1;
    }
    l += __shfl_xor_sync(~0u, l, 1); l += __shfl_xor_sync(~0u, l, 2);
    l8 += __shfl_xor_sync(~0u, l8, 1); l8 += __shfl_xor_sync(~0u, l8, 2);
    __syncthreads();
    // the warps' sums where their keys were: [warp][16][HD]
    float* o_s = (float*)kv_s;
#pragma unroll
    for (int d = 0; d < HD / 8; d++) {
        float* t = o_s + (warp * 16 + (lane >> 2)) * HD + d * 8 + (lane & 3) * 2;
        *(float2*)t = make_float2(o[d][0], o[d][1]);
        *(float2*)(t + 8 * HD) = make_float2(o[d][2], o[d][3]);
    }
    if ((lane & 3) == 0) {
        m_s[warp][lane >> 2] = m; l_s[warp][lane >> 2] = l;
        m_s[warp][(lane >> 2) + 8] = m8; l_s[warp][(lane >> 2) + 8] = l8;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP * HD; i += WARPS * 32) {
        int g = i / HD, d = i % HD;
        float n = -1e30f, a = 0.f, z = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) n = fmaxf(n, m_s[w][g]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) { float c = exp2f(m_s[w][g] - n); z += c * l_s[w][g]; a += c * o_s[(w * 16 + g) * HD + d]; }
        out[place(p, r, (h * GROUP + g) * HD + d, GROUP * KVH * HD)] = to_e(a / z);
    }
}
KERNEL __launch_bounds__(WARPS * 32) llm_attend(const __grid_constant__ Llm p, const float* qkv, elt* out, int layer, int append) {
    attend<2>(p, qkv, out, layer, append);
}
// for few rows: a block has a multiprocessor to itself
KERNEL __launch_bounds__(WARPS * 32) llm_attend_deep(const __grid_constant__ Llm p, const float* qkv, elt* out, int layer, int append) {
    attend<4>(p, qkv, out, layer, append);
}
#endif

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

struct Draw {
    float top_p, tau_count; // repeats at or above tau_count redraw
    int top_k, window, speech_tokens;
};
#define DRAW_THREADS 1024
#define DRAW_WARPS (DRAW_THREADS / 32)
#define DRAW_PER 8 // scores of a thread
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
// DRAW_THREADS * DRAW_PER scores.
KERNEL __launch_bounds__(DRAW_THREADS) llm_draw(const __grid_constant__ Llm p, const __grid_constant__ Draw d, const float* logits, int v, int ld, int* tokens, int* counts, int max_rounds) {
    extern __shared__ __align__(16) unsigned char smem[];
    float* lp = (float*)smem;
    __shared__ float red[DRAW_WARPS];
    __shared__ double redd[DRAW_WARPS];
    __shared__ __align__(16) u64 best[DRAW_WARPS * MAX_K]; // (order of the score, -id), [place in its warp][warp]
    __shared__ int order[MAX_K];
    __shared__ int chosen, redraw, hit, last;
    // The next round's inputs are made here, so nothing of it may start before this ends.
    dep_wait();
    const int r = blockIdx.x, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int s = p.slots[r];
    if (s < 0) return;
    Seq* q = p.seq + s;
    const int round = counts[r], decoded = q->decoded;
    if (q->done) {
        __syncthreads();
        if (tid == 0 && round < max_rounds) { tokens[r * max_rounds + round] = TOKEN_NONE; counts[r] = round + 1; }
        return;
    }
    if (tid < MAX_K) order[tid] = -1;
    if (tid == 0) { redraw = 0; chosen = -1; hit = v; last = -1; }
    const bool masked = decoded < q->min_len;
    float x[DRAW_PER], mx = NEG_INF;
    int bad = 0;
#pragma unroll
    for (int m = 0; m < DRAW_PER; m++) {
        int i = tid + m * DRAW_THREADS;
        x[m] = NEG_INF;
        if (i < v) {
            x[m] = logits[(i64)r * ld + i];
            if (masked && i >= d.speech_tokens && i < q->mask_to) x[m] = NEG_INF;
            bad |= x[m] != x[m];
            mx = fmaxf(mx, x[m]);
        }
    }
    mx = warp_max(mx);
    if (lane == 0) red[warp] = mx;
    bad = __syncthreads_or(bad);
    mx = warp_max(red[lane]);
    const bool dead = bad || mx == NEG_INF;
    double z = 0;
#pragma unroll
    for (int m = 0; m < DRAW_PER; m++) if (tid + m * DRAW_THREADS < v) z += exp((double)(x[m] - mx));
    z = warp_sum(z);
    if (lane == 0) redd[warp] = z;
    __syncthreads();
    const double lz = log(warp_sum(redd[lane]));
    u32 key[DRAW_PER];
#pragma unroll
    for (int m = 0; m < DRAW_PER; m++) {
        int i = tid + m * DRAW_THREADS;
        key[m] = 0;
        if (i < v) {
            float l = (float)((double)(x[m] - mx) - lz);
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
            for (int m = 0; m < DRAW_PER; m++) if (key[m] > top) { top = key[m]; at = m; }
            u32 all = __reduce_max_sync(~0u, top);
            u32 mine = top == all && top ? (u32)(tid + at * DRAW_THREADS) : 0x7fffffffu;
            u32 id = __reduce_min_sync(~0u, mine);
#pragma unroll
            for (int m = 0; m < DRAW_PER; m++) if (m == at && mine == id) key[m] = 0;
            if (lane == 0) best[t * DRAW_WARPS + warp] = (u64)all << 32 | (u32)~id;
        }
        have = to;
        __syncthreads();
        more = 0;
        for (int c = tid; c < have * DRAW_WARPS; c += DRAW_THREADS) {
            const u64 own = best[c];
            int rank = 0;
#pragma unroll 8
            for (int o = 0; o < have * DRAW_WARPS; o += 2) {
                ulonglong2 two = *(const ulonglong2*)(best + o);
                rank += (two.x > own) + (two.y > own);
            }
            if (own >> 32 && rank < d.top_k) {
                order[rank] = (int)~(u32)own;
                more |= have < d.top_k && c / DRAW_WARPS == have - 1;
            }
        }
        more = __syncthreads_or(more);
    }
    u32 rnd[2];
    philox(q->key[0], q->key[1], (u32)decoded, rnd);
    const float u0 = (rnd[0] >> 8) * (1.f / 16777216.f), u1 = (rnd[1] >> 8) * (1.f / 16777216.f);
    if (warp == 0 && !dead) {
        int ids[2];
        float pr[2], sum = 0.f;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            ids[h] = order[lane + h * 32];
            pr[h] = ids[h] < 0 ? 0.f : expf(lp[ids[h]]);
        }
        // in turn, while less than top_p is taken
        double total = 0, run[2] = {0, 0};
        int n = 0;
        for (; n < d.top_k && sum < d.top_p; n++) {
            if (__shfl_sync(~0u, n < 32 ? ids[0] : ids[1], n & 31) < 0) break;
            float w = __shfl_sync(~0u, n < 32 ? pr[0] : pr[1], n & 31);
            sum += w;
            total += (double)w;
            if (lane == (n & 31)) run[n >> 5] = total;
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
            redraw = chosen >= 0 && !((float)rep < d.tau_count);
        }
    }
    __syncthreads();
    if (redraw) {
        // from everything but that id, in order of id: the thread in whose share the target falls looks for it
        const int no = chosen, n = (v + DRAW_THREADS - 1) / DRAW_THREADS, a = min(v, tid * n), b = min(v, a + n);
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
        for (int w = 0; w < DRAW_WARPS; w++) {
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
                tok = TOKEN_END;
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
