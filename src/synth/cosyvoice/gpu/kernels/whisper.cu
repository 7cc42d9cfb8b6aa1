// Whisper: features to states, states and tokens to scores. GEMMs are gemm.cu's and cuBLASLt's; here is the rest.
//
// EHD, DHD: head widths of encoder and decoder, powers of two from 16 to 128. Residuals are float, operands `elt`.
#ifndef EHD
#define EHD 64
#define DHD 64
#endif

// The exact form in every precision: Whisper was trained with it.
DEV float gelu_erf(float x) { return 0.5f * x * (1.f + erff(x * 0.70710678118654752f)); }

// The sum, or the maximum, of a value of every thread of the block. `room` is one float a warp.
template <bool MAX> DEV float over_block(float v, float* room) {
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        float w = __shfl_xor_sync(~0u, v, o);
        v = MAX ? fmaxf(v, w) : v + w;
    }
    __syncthreads();
    if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = v;
    __syncthreads();
    float r = room[0];
    for (int i = 1; i < blockDim.x >> 5; i++) r = MAX ? fmaxf(r, room[i]) : r + room[i];
    return r;
}

// What the first convolution takes for frame f: bands of frames f-1, f and f+1, then zeros up to `width`.
KERNEL __launch_bounds__(128) hear_frames(const float* x, elt* out, int frames, int bands, int width) {
    dep_go();
    dep_wait();
    const int f = blockIdx.x;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        int tap = i / bands, from = f + tap - 1;
        bool in = tap < 3 && from >= 0 && from < frames;
        out[(i64)f * width + i] = to_e(in ? x[(i64)from * bands + i % bands] : 0.f);
    }
}

// The same for the second, of every other frame.
KERNEL __launch_bounds__(128) hear_halves(const elt* x, elt* out, int frames, int channels) {
    dep_go();
    dep_wait();
    const int t = blockIdx.x;
    for (int i = threadIdx.x; i < 3 * channels; i += blockDim.x) {
        int from = 2 * t + i / channels - 1;
        bool in = from >= 0 && from < frames;
        out[(i64)t * 3 * channels + i] = in ? x[(i64)from * channels + i % channels] : to_e(0.f);
    }
}

KERNEL __launch_bounds__(256) hear_gelu(elt* x, i64 count) {
    dep_go();
    dep_wait();
    i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 2;
    if (i >= count) return;
    float2 v = load2(x + i);
    store2(x + i, gelu_erf(v.x), gelu_erf(v.y));
}

// Activated outputs of the second convolution, with their positions.
KERNEL __launch_bounds__(256) hear_places(const elt* y, const float* places, float* x, i64 count) {
    dep_go();
    dep_wait();
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] = gelu_erf(to_f(y[i])) + places[i];
}

// Token vectors with their positions. words: {text, position, token, window}.
KERNEL __launch_bounds__(128) hear_embed(const int4* words, const elt* tokens, const float* places, float* x, int width, float scale) {
    dep_go();
    dep_wait();
    const int4 word = words[blockIdx.x];
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        x[(i64)blockIdx.x * width + i] = to_f(tokens[(i64)word.z * width + i]) * scale + places[(i64)word.y * width + i];
}

// Adds `add` to the residual, if there is one, and normalises the layer. `pick`: only these rows, which are not kept.
KERNEL __launch_bounds__(128) hear_norm(float* x, const elt* add, const float* weight, const float* bias, elt* out, const int* pick, int width) {
    __shared__ float room[4];
    dep_go();
    dep_wait();
    const i64 from = (i64)(pick ? pick[blockIdx.x] : (int)blockIdx.x) * width, to = (i64)blockIdx.x * width;
    // Every thread comes back to its own values only.
    float sum = 0.f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float v = x[from + i];
        if (add) { v += to_f(add[from + i]); x[from + i] = v; }
        sum += v;
    }
    const float mean = over_block<false>(sum, room) / width;
    float squares = 0.f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float v = x[from + i] - mean;
        squares = fmaf(v, v, squares);
    }
    const float scale = 1.f / sqrtf(over_block<false>(squares, room) / width + 1e-5f);
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        out[to + i] = to_e((x[from + i] - mean) * scale * weight[i] + bias[i]);
}

// Keys and values of new tokens into their texts: [text][layer][position][2][width].
KERNEL __launch_bounds__(128) hear_keep(const int4* words, const elt* qkv, elt* store, i64 per_text, i64 layer, int width) {
    dep_go();
    dep_wait();
    const int4 word = words[blockIdx.x];
    const elt* from = qkv + (i64)blockIdx.x * 3 * width + width;
    elt* to = store + word.x * per_text + layer + (i64)word.y * 2 * width;
    for (int i = threadIdx.x; i < 2 * width; i += blockDim.x) to[i] = from[i];
}

// One head of one token over its window's `length` positions, or with 0 over its text up to its own. Queries are scaled already.
// Sums of a token do not depend on which others there are.
#define RECALL_THREADS 512
#define PAIRS (DHD / 2)
#define SHARES (RECALL_THREADS / PAIRS)
KERNEL __launch_bounds__(RECALL_THREADS) hear_recall(const int4* words, const elt* q, int ldq, const elt* store, i64 per_text, i64 layer, int length, int width, elt* out) {
    extern __shared__ float weights[];
    __shared__ float q_s[DHD], room[RECALL_THREADS / 32], part[SHARES][DHD];
    dep_go();
    dep_wait();
    const int head = blockIdx.x, row = blockIdx.y;
    const int4 word = words[row];
    const int count = length ? length : word.y + 1;
    const elt* keys = store + (length ? word.w : word.x) * per_text + layer + head * DHD;
    const elt* values = keys + width;
    const i64 next = 2 * (i64)width;
    if (threadIdx.x < DHD) q_s[threadIdx.x] = to_f(q[(i64)row * ldq + head * DHD + threadIdx.x]);
    __syncthreads();
    float most = -1e30f;
    for (int t = threadIdx.x; t < count; t += RECALL_THREADS) {
        Eight raw[DHD / 8];
#pragma unroll
        for (int c = 0; c < DHD / 8; c++) raw[c] = load_raw(keys + t * next + c * 8);
        float s = 0.f;
#pragma unroll
        for (int c = 0; c < DHD / 8; c++) {
            float k[8];
            expand(raw[c], k);
#pragma unroll
            for (int d = 0; d < 8; d++) s = fmaf(k[d], q_s[c * 8 + d], s);
        }
        weights[t] = s;
        most = fmaxf(most, s);
    }
    most = over_block<true>(most, room);
    float sum = 0.f;
    for (int t = threadIdx.x; t < count; t += RECALL_THREADS) {
        float e = expf(weights[t] - most);
        weights[t] = e;
        sum += e;
    }
    // Its barriers also show every weight to every thread.
    sum = over_block<false>(sum, room);
    const int pair = threadIdx.x % PAIRS, share = threadIdx.x / PAIRS;
    float a = 0.f, b = 0.f;
#pragma unroll 8
    for (int t = share; t < count; t += SHARES) {
        float2 v = load2(values + t * next + pair * 2);
        a = fmaf(weights[t], v.x, a);
        b = fmaf(weights[t], v.y, b);
    }
    part[share][pair * 2] = a;
    part[share][pair * 2 + 1] = b;
    __syncthreads();
    if (threadIdx.x < DHD) {
        float v = 0.f;
        for (int i = 0; i < SHARES; i++) v += part[i][threadIdx.x];
        out[(i64)row * width + head * DHD + threadIdx.x] = to_e(v / sum);
    }
}

// One head of 64 positions of a window over all of it, with the running softmax of flash attention. qkv: [positions][3][width],
// queries scaled already.
#define QUERIES 64
#define KEYS 64
#if ELT != 0
#define PIECES (EHD / 8)
#define TILE (KEYS * EHD * 2)
// Piece `q` of 16 bytes of row `r` of a tile: neighbouring rows use different banks.
DEV u32 place(int r, int q) { return r * (EHD * 2) + ((q ^ (r & (PIECES - 1))) << 4); }
KERNEL __launch_bounds__(128) hear_attend(const elt* qkv, elt* out, int positions, int width) {
    extern __shared__ __align__(128) unsigned char smem[];
    dep_go();
    dep_wait();
    const int head = blockIdx.x, q0 = blockIdx.y * QUERIES, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const i64 row = 3 * (i64)width;
    const elt* base = qkv + head * EHD;
    const u32 qs = smem_addr(smem), kv = qs + QUERIES * EHD * 2;
    auto fetch = [&](int tile, int stage) {
        const u32 ks = kv + stage * 2 * TILE;
        for (int i = tid; i < KEYS * PIECES; i += 128) {
            int r = i / PIECES, c = i % PIECES, t = tile * KEYS + r;
            bool ok = t < positions;
            const elt* k = base + (ok ? t : 0) * row + width + c * 8;
            cp16(ks + place(r, c), k, ok);
            cp16(ks + TILE + place(r, c), k + width, ok);
        }
        cp_commit();
    };
    for (int i = tid; i < QUERIES * PIECES; i += 128) {
        int r = i / PIECES, c = i % PIECES, t = q0 + r;
        bool ok = t < positions;
        cp16(qs + place(r, c), base + (ok ? t : 0) * row + c * 8, ok);
    }
    fetch(0, 0);
    cp_wait<0>();
    __syncthreads();
    uint4 qf[EHD / 16];
#pragma unroll
    for (int k = 0; k < EHD / 16; k++)
        ldm4(qs + place(warp * 16 + (lane & 15), k * 2 + (lane >> 4)), qf[k].x, qf[k].y, qf[k].z, qf[k].w);
    float o[EHD / 8][4] = {}, m0 = -1e30f, m1 = -1e30f, l0 = 0.f, l1 = 0.f;
    const float log2e = 1.4426950408889634f;
    const int tiles = (positions + KEYS - 1) / KEYS;
    for (int tile = 0; tile < tiles; tile++) {
        if (tile + 1 < tiles) { fetch(tile + 1, (tile + 1) & 1); cp_wait<1>(); } else cp_wait<0>();
        __syncthreads();
        const u32 ks = kv + (tile & 1) * 2 * TILE, vs = ks + TILE;
        float s[KEYS / 8][4] = {};
#pragma unroll
        for (int k = 0; k < EHD / 16; k++)
#pragma unroll
            for (int n = 0; n < KEYS / 8; n += 2) {
                u32 b0, b1, b2, b3;
                ldm4(ks + place(n * 8 + (lane & 7) + ((lane >> 4) << 3), k * 2 + ((lane >> 3) & 1)), b0, b1, b2, b3);
                mma(s[n], qf[k], b0, b1);
                mma(s[n + 1], qf[k], b2, b3);
            }
        const int left = positions - tile * KEYS;
        float n0 = m0, n1 = m1;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (n * 8 + (lane & 3) * 2 + (e & 1) >= left) s[n][e] = -1e30f;
                else s[n][e] *= log2e;
                if (e < 2) n0 = fmaxf(n0, s[n][e]); else n1 = fmaxf(n1, s[n][e]);
            }
        n0 = fmaxf(n0, __shfl_xor_sync(~0u, n0, 1)); n0 = fmaxf(n0, __shfl_xor_sync(~0u, n0, 2));
        n1 = fmaxf(n1, __shfl_xor_sync(~0u, n1, 1)); n1 = fmaxf(n1, __shfl_xor_sync(~0u, n1, 2));
        const float c0 = exp2f(m0 - n0), c1 = exp2f(m1 - n1);
        m0 = n0; m1 = n1;
        l0 *= c0; l1 *= c1;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
            s[n][0] = exp2f(s[n][0] - m0); s[n][1] = exp2f(s[n][1] - m0);
            s[n][2] = exp2f(s[n][2] - m1); s[n][3] = exp2f(s[n][3] - m1);
            l0 += s[n][0] + s[n][1];
            l1 += s[n][2] + s[n][3];
        }
#pragma unroll
        for (int n = 0; n < EHD / 8; n++) { o[n][0] *= c0; o[n][1] *= c0; o[n][2] *= c1; o[n][3] *= c1; }
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            const uint4 p = make_uint4(pack2(s[2 * k][0], s[2 * k][1]), pack2(s[2 * k][2], s[2 * k][3]), pack2(s[2 * k + 1][0], s[2 * k + 1][1]), pack2(s[2 * k + 1][2], s[2 * k + 1][3]));
#pragma unroll
            for (int n = 0; n < EHD / 8; n += 2) {
                u32 b0, b1, b2, b3;
                ldm4t(vs + place(k * 16 + (lane & 7) + (((lane >> 3) & 1) << 3), n + (lane >> 4)), b0, b1, b2, b3);
                mma(o[n], p, b0, b1);
                mma(o[n + 1], p, b2, b3);
            }
        }
        // The next round fetches over this tile.
        __syncthreads();
    }
    l0 += __shfl_xor_sync(~0u, l0, 1); l0 += __shfl_xor_sync(~0u, l0, 2);
    l1 += __shfl_xor_sync(~0u, l1, 1); l1 += __shfl_xor_sync(~0u, l1, 2);
    const int t0 = q0 + warp * 16 + (lane >> 2), t1 = t0 + 8;
#pragma unroll
    for (int n = 0; n < EHD / 8; n++) {
        int d = head * EHD + n * 8 + (lane & 3) * 2;
        if (t0 < positions) store2(out + (i64)t0 * width + d, o[n][0] / l0, o[n][1] / l0);
        if (t1 < positions) store2(out + (i64)t1 * width + d, o[n][2] / l1, o[n][3] / l1);
    }
}
#else
// Plain float: a thread has a query, and takes its keys in order.
KERNEL __launch_bounds__(QUERIES) hear_attend(const elt* qkv, elt* out, int positions, int width) {
    __shared__ __align__(16) float k_s[16][EHD], v_s[16][EHD];
    dep_go();
    dep_wait();
    const int head = blockIdx.x, t = blockIdx.y * QUERIES + threadIdx.x;
    const i64 row = 3 * (i64)width;
    const elt* base = qkv + head * EHD;
    float q[EHD], o[EHD], m = -1e30f, l = 0.f;
#pragma unroll
    for (int d = 0; d < EHD; d++) { q[d] = t < positions ? base[t * row + d] : 0.f; o[d] = 0.f; }
    for (int first = 0; first < positions; first += 16) {
        const int here = min(16, positions - first);
        __syncthreads();
        for (int i = threadIdx.x; i < here * EHD; i += QUERIES) {
            const elt* k = base + (first + i / EHD) * row + width + i % EHD;
            k_s[i / EHD][i % EHD] = k[0];
            v_s[i / EHD][i % EHD] = k[width];
        }
        __syncthreads();
        for (int j = 0; j < here; j++) {
            float s = 0.f;
#pragma unroll
            for (int d = 0; d < EHD; d++) s = fmaf(q[d], k_s[j][d], s);
            const float n = fmaxf(m, s), c = expf(m - n), e = expf(s - n);
            m = n;
            l = l * c + e;
#pragma unroll
            for (int d = 0; d < EHD; d++) o[d] = o[d] * c + e * v_s[j][d];
        }
    }
    if (t >= positions) return;
#pragma unroll
    for (int d = 0; d < EHD; d++) out[(i64)t * width + head * EHD + d] = o[d] / l;
}
#endif
