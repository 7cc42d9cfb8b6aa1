// The flow: tokens to conditioning, and one Euler step of the transformer over ragged blocks.
//
// A chunk is one block of frames of one utterance (the last may be shorter); it takes two rows of `BLOCK` frames, one guided
// and one not, which of most chunks is known at the first Euler step and not run. Its keys and values, and its x and mu, live in
// slabs that the utterance keeps; what came before is reached through the utterance's list of them.
//
// HD: head width; HEADS; DIM: residual width; MEL; BLOCK: frames of a block; LAYERS; STEPS: Euler steps; POSITION_TAPS: of
// the position convolutions; INT8: whether keys and values are kept in 8 bits; FP8: whether GEMMs may take their inputs in 8 bits,
// then times `by` where that is not zero.
#ifndef HD
#define HD 64
#define HEADS 16
#define DIM 1024
#define MEL 80
#define BLOCK 50
#define LAYERS 22
#define STEPS 10
#define POSITION_TAPS 31
#define INT8 0
#define FP8 0
#define CIN 320
#endif
#define INNER (HD * HEADS)
#define PAGES 64

// One row of a chunk.
struct Chunk {
    u64 hist;      // histories of the position convolutions: [step][row][2][HIST][DIM]
    u64 cond;      // prompt mel, float [cond_frames][MEL]
    u64 speaker;   // float [spk]
    u64 own;       // where its x and mu lie, less their offset
    u64 unguided;  // where the result of the row without guidance lies, as that of a row
    int step, frame0, frames, keys; // Euler step, first frame, frames that count, end of what may be seen
    int key0, cond_frames, row, flag; // row: 0 guided, 1 not, -1 nobody's; flag: where a value that is not finite is noted
    u64 page[PAGES]; // where the keys and values of each block lie, less the offset of this Euler step in a slab
};
// Inside a slab: keys and values as [step][layer][row][2][head][BLOCK][HD], then x and mu as float [BLOCK][..] of a few
// blocks. In 8 bits a head's [BLOCK][HD] integers have a scale for each frame after them, float [BLOCK].
#if INT8
#define HEAD_BYTES ((BLOCK * HD + BLOCK * 4 + 15) / 16 * 16)
#else
#define HEAD_BYTES (BLOCK * HD * (i64)sizeof(elt))
#endif
DEV i64 kv_offset(int step, int layer, int row, int v, int head) {
    return (((((i64)step * LAYERS + layer) * 2 + row) * 2 + v) * HEADS + head) * HEAD_BYTES;
}
#define X_OFFSET ((i64)STEPS * LAYERS * 4 * HEADS * HEAD_BYTES)
#define MU_OFFSET (X_OFFSET + (i64)BLOCK * MEL * 4)
#if ELT != 0 && !INT8
// Where piece q of sixteen bytes of frame f lies in a head's keys or values, in bytes: pieces change places with the frame, so
// that a block of them is one copy to where warpgroup MMAs take it from.
DEV int kv_piece(int f, int q) { return f * HD * 2 + ((q ^ (f & (HD / 8 - 1))) << 4); }
#endif
DEV float* chunk_x(const Chunk& c) { return (float*)(c.own + X_OFFSET); }
DEV float* chunk_mu(const Chunk& c) { return (float*)(c.own + MU_OFFSET); }

// First half of the pre-lookahead layer. tokens[row]: ids from two before the chunk's first to `look` past its
// last; -1 where there is none. Hidden rows before the start of the prompt are zero.
//
// A block computes HT positions by 256 channels: four of them a thread, and a quarter of the sum.
#define HT 9
#define HPARTS 4
KERNEL __launch_bounds__(64 * HPARTS) flow_hidden(const Chunk* chunks, const int* tokens, int per_row, int count, const float* table, const float* w, const float* bias, float* hidden, int in, int ch, int look, int ratio, float slope) {
    extern __shared__ __align__(16) unsigned char smem[];
    // Sums of all parts but the first; then embeddings of HT positions and those that the last looks ahead to:
    // position t starts at t * in.
    float4* sums = (float4*)smem;
    float* e = (float*)(sums + (HPARTS - 1) * HT * 64);
    dep_go();
    dep_wait();
    const int t0 = blockIdx.x * HT, r = blockIdx.y, here = min(HT, count - t0), width = (look + 1) * in;
    const int part = threadIdx.x >> 6, lane = threadIdx.x & 63, c = (blockIdx.z * 64 + lane) * 4;
    for (int i = threadIdx.x * 4; i < (HT + look) * in; i += blockDim.x * 4) {
        int t = i / in;
        int id = t < here + look ? tokens[(i64)r * per_row + t0 + t] : -1;
        *(float4*)(e + i) = id < 0 ? make_float4(0.f, 0.f, 0.f, 0.f) : *(const float4*)(table + (i64)id * in + i % in);
    }
    __syncthreads();
    float4 s[HT];
#pragma unroll
    for (int t = 0; t < HT; t++) s[t] = make_float4(0.f, 0.f, 0.f, 0.f);
    const int k0 = width * part / HPARTS, k1 = width * (part + 1) / HPARTS;
    constexpr int BATCH = 16;
    for (int k = k0; c < ch && k < k1; k += BATCH) {
        float4 v[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++) v[j] = *(const float4*)(w + (i64)min(k + j, k1 - 1) * ch + c);
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            if (k + j >= k1) break;
#pragma unroll
            for (int t = 0; t < HT; t++) {
                float x = e[t * in + k + j];
                s[t].x = fmaf(x, v[j].x, s[t].x); s[t].y = fmaf(x, v[j].y, s[t].y); s[t].z = fmaf(x, v[j].z, s[t].z); s[t].w = fmaf(x, v[j].w, s[t].w);
            }
        }
    }
    if (part > 0)
#pragma unroll
        for (int t = 0; t < HT; t++) sums[((part - 1) * HT + t) * 64 + lane] = s[t];
    __syncthreads();
    if (part > 0 || c >= ch) return;
    const float4 b = *(const float4*)(bias + c);
    const int first = chunks[r].frame0 / ratio + t0 - 2;
#pragma unroll
    for (int t = 0; t < HT; t++) {
        if (t >= here) break;
        float4 v = s[t];
#pragma unroll
        for (int q = 0; q < HPARTS - 1; q++) {
            float4 o = sums[(q * HT + t) * 64 + lane];
            v.x += o.x; v.y += o.y; v.z += o.z; v.w += o.w;
        }
        v.x += b.x; v.y += b.y; v.z += b.z; v.w += b.w;
        v.x = v.x >= 0.f ? v.x : v.x * slope; v.y = v.y >= 0.f ? v.y : v.y * slope; v.z = v.z >= 0.f ? v.z : v.z * slope; v.w = v.w >= 0.f ? v.w : v.w * slope;
        if (first + t < 0) v = make_float4(0.f, 0.f, 0.f, 0.f);
        *(float4*)(hidden + ((i64)r * count + t0 + t) * ch + c) = v;
    }
}

// Second half, and the chunk's start: x is the noise of its frames, mu its conditioning. A block computes ST
// positions by SO outputs.
#define ST 5
#define SO 8
KERNEL __launch_bounds__(256) flow_start(const Chunk* chunks, const int* tokens, int per_row, int count, const float* table, const float* w, const float* bias, const float* hidden, const float* noise, int in, int ch, int ratio) {
    extern __shared__ __align__(16) unsigned char smem[];
    float* h = (float*)smem;
    dep_go();
    dep_wait();
    const int t0 = blockIdx.x * ST, r = blockIdx.y, lane = threadIdx.x & 31, here = min(ST, count - t0);
    const Chunk& c = chunks[r];
#pragma unroll 4
    for (int i = threadIdx.x * 4; i < (ST + 2) * ch; i += blockDim.x * 4)
        *(float4*)(h + i) = i < (here + 2) * ch ? *(const float4*)(hidden + ((i64)r * (count + 2) + t0) * ch + i) : make_float4(0.f, 0.f, 0.f, 0.f);
    __syncthreads();
    const int o1 = min(in, (int)(blockIdx.z + 1) * SO);
    for (int o = blockIdx.z * SO + (threadIdx.x >> 5); o < o1; o += blockDim.x >> 5) {
        float s[ST] = {};
#pragma unroll 16
        for (int k = lane; k < 3 * ch; k += 32) {
            float v = w[(i64)o * 3 * ch + k];
#pragma unroll
            for (int t = 0; t < ST; t++) s[t] = fmaf(h[t * ch + k], v, s[t]);
        }
#pragma unroll
        for (int t = 0; t < ST; t++) {
            float v = warp_sum(s[t]);
            if (t < here && lane < ratio) {
                int id = tokens[(i64)r * per_row + t0 + t + 2];
                chunk_mu(c)[((t0 + t) * ratio + lane) * MEL + o] = id < 0 ? 0.f : v + bias[o] + table[(i64)id * in + o];
            }
        }
    }
    if (blockIdx.z == 0)
        for (int i = threadIdx.x; i < here * ratio * MEL; i += blockDim.x) {
            int f = t0 * ratio + i / MEL;
            chunk_x(c)[f * MEL + i % MEL] = noise[(i64)(c.frame0 + f) * MEL + i % MEL];
        }
}

// The transformer's input rows [x, cond, mu, speaker], zeros for all but x without guidance; and where histories lie.
KERNEL flow_input(const Chunk* chunks, elt* out, u64* hist, int spk, int hist_frames, int width) {
    dep_go();
    dep_wait();
    const int f = blockIdx.x, rr = blockIdx.y;
    const Chunk& c = chunks[rr];
    if (f == 0 && threadIdx.x == 0)
        hist[rr] = c.hist + (((i64)c.step * 2 + max(c.row, 0)) * 2) * hist_frames * DIM * sizeof(elt);
    elt* o = out + ((i64)rr * BLOCK + f) * width;
    if (c.row < 0) {
        for (int i = threadIdx.x; i < width; i += blockDim.x) o[i] = to_e(0.f);
        return;
    }
    const float *x = chunk_x(c) + f * MEL, *mu = chunk_mu(c) + f * MEL;
    int frame = c.frame0 + f;
    const float* cond = c.cond && frame < c.cond_frames ? (const float*)c.cond + (i64)frame * MEL : nullptr;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float v = 0.f;
        if (i < MEL) v = x[i];
        else if (c.row == 0) {
            if (i < 2 * MEL) v = cond ? cond[i - MEL] : 0.f;
            else if (i < 3 * MEL) v = mu[i - 2 * MEL];
            else if (i < 3 * MEL + spk) v = ((const float*)c.speaker)[i - 3 * MEL];
        }
        o[i] = to_e(v);
    }
}

// Histories of blocks that are solved together: the end of each block's neighbour on the left, zeros for the first.
KERNEL flow_neighbours(const elt* x, const u64* hist, i64 off, int frames) {
    dep_go();
    dep_wait();
    int rr = blockIdx.y, f = blockIdx.x;
    elt* o = (elt*)hist[rr] + off + (i64)f * DIM;
    const elt* src = x + ((i64)(rr - 2) * BLOCK + BLOCK - frames + f) * DIM;
    for (int i = threadIdx.x; i < DIM; i += blockDim.x) o[i] = rr < 2 ? to_e(0.f) : src[i];
}

// The ends of all rows of x and of y into the first and the second history, for convolutions that did not do it.
KERNEL flow_keep(const elt* x, const elt* y, const u64* hist, i64 off, int frames) {
    dep_go();
    dep_wait();
    const int rr = blockIdx.y, f = blockIdx.x;
    const elt* src = (blockIdx.z ? y : x) + ((i64)rr * BLOCK + BLOCK - frames + f) * DIM;
    elt* o = (elt*)hist[rr] + (blockIdx.z ? off : 0) + (i64)f * DIM;
    for (int i = threadIdx.x * 8; i < DIM; i += blockDim.x * 8) *(Eight*)(o + i) = load_raw(src + i);
}

// h += gate * y (unless y is null), then LayerNorm and modulation into a. A block a row, sums in float.
//
// What does not depend on the step before is read before waiting for it: `chunks` was written before the first kernel
// of the step began, and modulation never changes. All else is asked for at once after that: a store between two loads
// would have the second wait for the first.
#define LN_THREADS 128
#define PER ((DIM + 4 * LN_THREADS - 1) / (4 * LN_THREADS))
DEV float row_sum(float v, float* part) {
    v = warp_sum(v);
    if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = v;
    __syncthreads();
    float s = 0.f;
#pragma unroll
    for (int w = 0; w < LN_THREADS / 32; w++) s += part[w];
    return s;
}
template <class Y, class A> DEV void norm(const Chunk* chunks, float* h, Y y, A a, const float* mod, i64 step_stride, i64 gate, i64 shift, i64 scale, float eps) {
    __shared__ float part[2][LN_THREADS / 32];
    dep_go();
    const int row = blockIdx.x;
    const float* m = mod + chunks[row / BLOCK].step * step_stride;
    float* hr = h + (i64)row * DIM;
    float4 gt[PER], sc[PER], sh[PER], own[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int c = (i * LN_THREADS + threadIdx.x) * 4;
        gt[i] = sc[i] = sh[i] = own[i] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (c >= DIM) continue;
        if (y) {
            gt[i] = *(const float4*)(m + gate + c);
            own[i] = y.before(c);
        }
        sc[i] = *(const float4*)(m + scale + c);
        sh[i] = *(const float4*)(m + shift + c);
    }
    dep_wait();
    float4 was[PER], read[PER][Y::READS];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int c = (i * LN_THREADS + threadIdx.x) * 4;
        was[i] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (c >= DIM) continue;
        was[i] = *(const float4*)(hr + c);
        if (y)
#pragma unroll
            for (int n = 0; n < Y::READS; n++) read[i][n] = y.at(n, row, c);
    }
    float v[PER][4];
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int c = (i * LN_THREADS + threadIdx.x) * 4;
        float4 x = was[i];
        if (y && c < DIM) {
            const float4 p = y.sum(own[i], read[i]);
            x.x = fmaf(gt[i].x, p.x, x.x); x.y = fmaf(gt[i].y, p.y, x.y); x.z = fmaf(gt[i].z, p.z, x.z); x.w = fmaf(gt[i].w, p.w, x.w);
            *(float4*)(hr + c) = x;
        }
        v[i][0] = x.x; v[i][1] = x.y; v[i][2] = x.z; v[i][3] = x.w;
        sum += x.x + x.y + x.z + x.w;
    }
    float mean = row_sum(sum, part[0]) * (1.f / DIM), var = 0.f;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        if ((i * LN_THREADS + threadIdx.x) * 4 >= DIM) continue;
#pragma unroll
        for (int e = 0; e < 4; e++) { v[i][e] -= mean; var = fmaf(v[i][e], v[i][e], var); }
    }
    float inv = rsqrtf(row_sum(var, part[1]) * (1.f / DIM) + eps);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int c = (i * LN_THREADS + threadIdx.x) * 4;
        if (c >= DIM) continue;
        a.put((i64)row * DIM + c, fmaf(v[i][0] * inv, 1.f + sc[i].x, sh[i].x), fmaf(v[i][1] * inv, 1.f + sc[i].y, sh[i].y), fmaf(v[i][2] * inv, 1.f + sc[i].z, sh[i].z), fmaf(v[i][3] * inv, 1.f + sc[i].w, sh[i].w));
    }
}

// What a GEMM reads: elements, or 8 bits.
struct Elements {
    elt* a;
    DEV void put(i64 at, float v0, float v1, float v2, float v3) const {
        store2(a + at, v0, v1);
        store2(a + at + 2, v2, v3);
    }
};
#if FP8
struct Fp8 {
    u32* a;
    float by;
    DEV void put(i64 at, float v0, float v1, float v2, float v3) const { a[at >> 2] = pack2_fp8(v0 * by, v1 * by) | (u32)pack2_fp8(v2 * by, v3 * by) << 16; }
};
#endif

// y as a GEMM leaves it: as elements; or as what the blocks that shared its inputs found, without its bias.
struct Whole {
    enum { READS = 1 };
    const elt* y;
    DEV operator bool() const { return y; }
    DEV float4 before(int) const { return make_float4(0.f, 0.f, 0.f, 0.f); }
    DEV float4 at(int, int row, int c) const {
        const float2 p = load2(y + (i64)row * DIM + c), q = load2(y + (i64)row * DIM + c + 2);
        return make_float4(p.x, p.y, q.x, q.y);
    }
    DEV float4 sum(float4, const float4* read) const { return read[0]; }
};
KERNEL __launch_bounds__(LN_THREADS) flow_norm(const Chunk* chunks, float* h, const elt* y, elt* a, const float* mod, i64 step_stride, i64 gate, i64 shift, i64 scale, float eps) {
    norm(chunks, h, Whole{y}, Elements{a}, mod, step_stride, gate, shift, scale, eps);
}
#if FP8
KERNEL __launch_bounds__(LN_THREADS) flow_norm_fp8(const Chunk* chunks, float* h, const elt* y, u32* a, const float* mod, i64 step_stride, i64 gate, i64 shift, i64 scale, float eps, float by) {
    norm(chunks, h, Whole{y}, Fp8{a, by}, mod, step_stride, gate, shift, scale, eps);
}
#endif
#define PARTS 4
struct Shares {
    enum { READS = PARTS };
    const float *y, *bias;
    i64 stride; // from one part to the next
    DEV operator bool() const { return true; }
    DEV float4 before(int c) const { return *(const float4*)(bias + c); }
    DEV float4 at(int part, int row, int c) const { return *(const float4*)(y + part * stride + (i64)row * DIM + c); }
    DEV float4 sum(float4 v, const float4* read) const {
#pragma unroll
        for (int i = 0; i < PARTS; i++) { v.x += read[i].x; v.y += read[i].y; v.z += read[i].z; v.w += read[i].w; }
        return v;
    }
};
KERNEL __launch_bounds__(LN_THREADS) flow_norm_shares(const Chunk* chunks, float* h, const float* y, i64 stride, const float* bias, elt* a, const float* mod, i64 step_stride, i64 gate, i64 shift, i64 scale, float eps) {
    norm(chunks, h, Shares{y, bias, stride}, Elements{a}, mod, step_stride, gate, shift, scale, eps);
}

// x += dt * ((1 + guidance) guided - guidance unguided); says which chunk is no longer finite.
KERNEL flow_euler(const Chunk* chunks, const float* v, const float* dt, float guidance, int ldv, int* bad) {
    dep_go();
    const Chunk& c = chunks[blockIdx.y];
    const int row = c.row;
    const float time = row == 0 ? dt[c.step] : 0.f, *other = (const float*)c.unguided;
    float* x = chunk_x(c);
    dep_wait();
    if (row != 0) return;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= BLOCK * MEL) return;
    int f = i / MEL, m = i % MEL;
    const float guided = v[((i64)blockIdx.y * BLOCK + f) * ldv + m], unguided = other[f * ldv + m];
    float d = (1.f + guidance) * guided - guidance * unguided;
    x += i;
    float n = *x + time * d;
    *x = n;
    if (f < c.frames && !(fabsf(n) < 1e30f)) bad[c.flag] = 1;
}

// Rotates neighbouring channels of the first head; the others carry no position.
DEV float2 rotate_pair(float2 v, float2 cs) { return make_float2(v.x * cs.x - v.y * cs.y, v.y * cs.x + v.x * cs.y); }

#if INT8
// Eight of a frame's values as integers, and what they are to be multiplied by: the largest of the frame's HD values is 127.
// HD / 8 neighbouring lanes have the frame's values, and meet here.
DEV uint2 to_int8(uint4 x, float& scale) {
    const float2 v[4] = {unpack2(x.x), unpack2(x.y), unpack2(x.z), unpack2(x.w)};
    constexpr int LANES = HD / 8;
    const u32 all = (u32)((1ull << LANES) - 1) << (threadIdx.x & 31 & ~(LANES - 1));
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) most = fmaxf(most, fmaxf(fabsf(v[i].x), fabsf(v[i].y)));
#pragma unroll
    for (int w = LANES / 2; w; w >>= 1) most = fmaxf(most, __shfl_xor_sync(all, most, w));
    scale = most * (1.f / 127.f);
    const float by = most > 0.f ? 127.f / most : 0.f;
    auto two = [&](float2 p) { return (u32)(__float2int_rn(p.x * by) & 255) | (u32)(__float2int_rn(p.y * by) & 255) << 8; };
    return make_uint2(two(v[0]) | two(v[1]) << 16, two(v[2]) | two(v[3]) << 16);
}
DEV uint4 from_int8(uint2 x, float scale) {
    auto two = [&](u32 w, int at) { return pack2((float)(signed char)(w >> at) * scale, (float)(signed char)(w >> (at + 8)) * scale); };
    return make_uint4(two(x.x, 0), two(x.x, 16), two(x.y, 0), two(x.y, 16));
}
// Piece q of frame f of a head's keys or values.
DEV void store_int8(u64 head, int f, int q, uint4 x) {
    float scale;
    const uint2 bytes = to_int8(x, scale);
    *(uint2*)(head + f * HD + q * 8) = bytes;
    if (q == 0) *(float*)(head + BLOCK * HD + f * 4) = scale;
}
#endif
// Eight neighbouring channels of the first head, from pair `at` of a frame's angles on.
#if ELT != 0
DEV uint4 rotate_eight(uint4 x, const float2* at) {
    auto turned = [](u32 pair, float2 cs) { float2 r = rotate_pair(unpack2(pair), cs); return pack2(r.x, r.y); };
    return make_uint4(turned(x.x, at[0]), turned(x.y, at[1]), turned(x.z, at[2]), turned(x.w, at[3]));
}
#endif
// The chunk's own keys and values into its slab, in 16 byte pieces.
DEV void append_kv(const Chunk& c, const elt* qkv, i64 row0, int layer, int head, const float2* rope, int tid, int threads) {
    const u64 page = c.page[c.frame0 / BLOCK], keys = page + kv_offset(c.step, layer, c.row, 0, head), values = page + kv_offset(c.step, layer, c.row, 1, head);
#if INT8
    for (int i = tid; i < BLOCK * (HD / 8); i += threads) {
        const int f = i / (HD / 8), q = i % (HD / 8);
        const elt* src = qkv + (row0 + f) * 3 * INNER + INNER + head * HD + q * 8;
        uint4 k = *(const uint4*)src;
        if (head == 0) k = rotate_eight(k, rope + (i64)(c.frame0 + f) * (HD / 2) + q * 4);
        store_int8(keys, f, q, k);
        store_int8(values, f, q, *(const uint4*)(src + INNER));
    }
#elif ELT != 0
#pragma unroll 4
    for (int i = tid; i < BLOCK * (HD / 8); i += threads) {
        const int f = i / (HD / 8), q = i % (HD / 8);
        const elt* src = qkv + (row0 + f) * 3 * INNER + INNER + head * HD + q * 8;
        uint4 k = *(const uint4*)src;
        if (head == 0) k = rotate_eight(k, rope + (i64)(c.frame0 + f) * (HD / 2) + q * 4);
        *(uint4*)(keys + kv_piece(f, q)) = k;
        *(uint4*)(values + kv_piece(f, q)) = *(const uint4*)(src + INNER);
    }
#else
    float *kd = (float*)keys, *vd = (float*)values;
    for (int i = tid; i < BLOCK * (HD / 2); i += threads) {
        int f = i / (HD / 2), j = i % (HD / 2);
        const elt* src = qkv + (row0 + f) * 3 * INNER + INNER + head * HD + 2 * j;
        float2 k = load2(src);
        if (head == 0) k = rotate_pair(k, rope[(i64)(c.frame0 + f) * (HD / 2) + j]);
        store2(kd + f * HD + 2 * j, k.x, k.y);
        float2 v = load2(src + INNER);
        store2(vd + f * HD + 2 * j, v.x, v.y);
    }
#endif
}
// Keys and values of all chunks before any attends: for whole utterances at once.
KERNEL flow_append(const Chunk* chunks, const elt* qkv, const float2* rope, int layer) {
    dep_go();
    dep_wait();
    const Chunk& c = chunks[blockIdx.y];
    if (c.row < 0) return;
    append_kv(c, qkv, (i64)blockIdx.y * BLOCK, layer, blockIdx.x, rope, threadIdx.x, blockDim.x);
}
