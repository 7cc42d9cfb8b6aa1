// The vocoder around its convolutions (gemm.cu): F0 in double, excitation, spectra, and sums between stages.
//
// Rows of many utterances lie one after another at every rate; `Voc` says where. Histories are read from one copy
// and written to another, which the host swaps after the call.
//
// MEL, BLOCK, X_OFFSET: where mel frames lie in slabs. F0C: channels of the F0 network. HARM: sines. FRAME: samples
// of a mel frame. NFFT, HOP. RING: frames of tones kept.
#ifndef MEL
#define MEL 80
#define BLOCK 50
#define X_OFFSET 0ll
#define F0C 512
#define HARM 9
#define FRAME 480
#define NFFT 16
#define HOP 4
#define RING 128
#endif
#define BINS (NFFT / 2 + 1)
#define ROWS (2 * BINS)
#define COLS (FRAME / HOP)
#define F0_AHEAD 3
#define F0_KEEP 2
#define VOC_PAGES 8
#define POST_KEEP (COLS + NFFT / HOP)

struct Voc {
    u64 f0_in, f0_out;     // double [4][F0_KEEP][F0C]
    u64 post_in, post_out; // float [POST_KEEP][ROWS]
    u64 tones;             // float2 [RING]: sum of sines, loudness of the noise
    u64 phase;             // double [HARM]
    int frame0;            // frames of the prompt: where the first generated frame lies
    int f0_from, f0_to;    // frames whose F0 is new
    int from, to;          // frames that pass through the network
    int total, last;       // frames there are; whether no more will come
    int f0_row, row;       // first row of the F0 frames, of the network's frames
    int spec_row;          // first row of the spectrum
    int top_row;           // first row at the last rate
    int pcm_row;           // first sample of the result
    int page_first, live;
    u64 page[VOC_PAGES];
};

// Mel value of a generated frame; zero past the end.
DEV float mel_at(const Voc& v, int f, int m) {
    if (f >= v.total) return 0.f;
    int a = v.frame0 + f;
    const float* x = (const float*)(v.page[a / BLOCK - v.page_first] + X_OFFSET);
    return x[(a % BLOCK) * MEL + m];
}

// 16 x 8 += 16 x 16 by 16 x 8. a[i]: row lane/4 + 8*(i%2), column lane%4 + 4*(i/2); b[i]: row lane%4 + 4*i, column
// lane/4; c: rows lane/4 (first two) and 8 more, columns 2*(lane%4) and the next.
#if __CUDA_ARCH__ >= 900
DEV void dmma(double* c, const double* a, const double* b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7,%8,%9,%10,%11}, {%12,%13,%14,%15}, {%0,%1,%2,%3};"
                 : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
                 : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]), "d"(b[1]), "d"(b[2]), "d"(b[3]));
}
#else
DEV void dmma(double* c, const double* a, const double* b) {
#pragma unroll
    for (int i = 0; i < 8; i++)
        asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};" : "+d"(c[i % 2 * 2]), "+d"(c[i % 2 * 2 + 1]) : "d"(a[i]), "d"(b[i / 2]));
}
#endif
// One layer of the F0 network, convolution and ELU. Layer 0 looks ahead in the mel, the others back.
// w: [tap][in][F0C].
// A block computes 16*MM*WM frames by 8*NN*WN channels with KG groups of WM x WN warps. Weights of one (FC channels, tap) are
// a stage of a ring of ST, of which a group has every KG-th sixteen channels: an MMA in double waits long for the one before.
template <int MM, int NN, int WM, int WN, int KG, int FC, int ST> DEV void f0_layer(const Voc* vocs, const int4* tiles, int layer, const double* in, double* out, const double* w, const float* bias) {
    extern __shared__ __align__(128) unsigned char smem[];
    constexpr int FT = 16 * MM * WM, FN = 8 * NN * WN, GROUP = 32 * WM * WN, FTH = GROUP * KG, FX_LD = FC + 4, FW_LD = FN + 4;
    constexpr int XROWS = FT + F0_AHEAD, XPER = (XROWS * FC + FTH - 1) / FTH, WPER = FC * FN / 2 / FTH;
    constexpr int WSTAGE = FC * FW_LD;
    double* ws = (double*)smem;
    double* xs = ws + ST * WSTAGE;
    dep_go();
    const int4 s = tiles[blockIdx.x];
    if (s.x < 0) { dep_wait(); return; }
    const int taps = layer ? F0_KEEP + 1 : F0_AHEAD + 1, cin = layer ? F0C : MEL, t0 = s.y, n0 = blockIdx.y * FN;
    const int lane = threadIdx.x & 31, group = threadIdx.x / GROUP, warp = threadIdx.x % GROUP >> 5;
    const int tw = warp % WM * MM * 16, nw = warp / WM * NN * 8;
    const int chunks = (cin + FC - 1) / FC, iters = chunks * taps;
    const u32 wb = smem_addr(ws);
    auto fetch = [&](int it) {
        if (it < iters) {
            const int c0 = it / taps * FC, tap = it % taps;
            const u32 dst = wb + it % ST * WSTAGE * 8;
#pragma unroll
            for (int j = 0; j < WPER; j++) {
                int i = threadIdx.x + j * FTH, k = i / (FN / 2), n = i % (FN / 2) * 2;
                bool ok = c0 + k < cin && n0 + n < F0C;
                cp16(dst + (k * FW_LD + n) * 8, ok ? w + ((i64)tap * cin + c0 + k) * F0C + n0 + n : w, ok);
            }
        }
        cp_commit();
    };
    for (int it = 0; it < ST - 1; it++) fetch(it);
    dep_wait();
    const Voc& v = vocs[s.x];
    const double* hin = (const double*)v.f0_in + (i64)(layer - 1) * F0_KEEP * F0C;
    double* hout = (double*)v.f0_out + (i64)(layer - 1) * F0_KEEP * F0C;
    // The next FC channels travel while these are used.
    double next[XPER];
    auto take = [&](int chunk) {
#pragma unroll
        for (int j = 0; j < XPER; j++) {
            int i = threadIdx.x + j * FTH, r = i / FC, c = chunk * FC + i % FC;
            double x = 0;
            if (r < FT + taps - 1 && c < cin) {
                if (layer == 0) {
                    x = mel_at(v, v.f0_from + t0 + r, c);
                } else {
                    int t = t0 + r - F0_KEEP;
                    if (t < 0) x = hin[(t + F0_KEEP) * F0C + c];
                    else if (t < s.w) x = in[(i64)(s.z + t) * F0C + c];
                }
            }
            next[j] = x;
        }
    };
    take(0);
    double acc[MM][NN][4] = {};
    for (int it = 0; it < iters; it++) {
        const int chunk = it / taps, tap = it % taps;
        cp_wait<ST - 2>();
        __syncthreads();
        if (tap == 0) {
#pragma unroll
            for (int j = 0; j < XPER; j++) {
                int i = threadIdx.x + j * FTH, r = i / FC, c = chunk * FC + i % FC;
                if (r >= XROWS) continue;
                xs[r * FX_LD + i % FC] = next[j];
                // the last frames of (history, input) are the next call's history
                int t = t0 + r - F0_KEEP, h = t - s.w + F0_KEEP;
                if (layer && blockIdx.y == 0 && c < cin && r < FT + taps - 1 && h >= 0 && h < F0_KEEP && (t >= t0 || t0 == 0)) hout[h * F0C + c] = next[j];
            }
            if (chunk + 1 < chunks) take(chunk + 1);
            __syncthreads();
        }
        fetch(it + ST - 1);
        const double* wt = ws + it % ST * WSTAGE;
#pragma unroll
        for (int q = 0; q < FC; q += 16 * KG) {
            const int k = q + 16 * group;
            double a[MM][8];
#pragma unroll
            for (int m = 0; m < MM; m++)
#pragma unroll
                for (int i = 0; i < 8; i++) a[m][i] = xs[(tw + m * 16 + (lane >> 2) + i % 2 * 8 + tap) * FX_LD + k + i / 2 * 4 + (lane & 3)];
#pragma unroll
            for (int j = 0; j < NN; j++) {
                double b[4];
#pragma unroll
                for (int i = 0; i < 4; i++) b[i] = wt[(k + i * 4 + (lane & 3)) * FW_LD + nw + j * 8 + (lane >> 2)];
#pragma unroll
                for (int m = 0; m < MM; m++) dmma(acc[m][j], a[m], b);
            }
        }
    }
    constexpr int SUMS = MM * NN * 4;
    static_assert(FC % (16 * KG) == 0 && (KG - 1) * SUMS * GROUP <= ST * WSTAGE, "shares and room");
    if constexpr (KG > 1) {
        // The groups' sums where weights were: [group][sum][thread].
        double *sums = &acc[0][0][0], *mine = ws + threadIdx.x % GROUP;
        cp_wait<0>();
        __syncthreads();
        if (group > 0)
#pragma unroll
            for (int e = 0; e < SUMS; e++) mine[((group - 1) * SUMS + e) * GROUP] = sums[e];
        __syncthreads();
        if (group > 0) return;
#pragma unroll
        for (int g = 0; g < KG - 1; g++)
#pragma unroll
            for (int e = 0; e < SUMS; e++) sums[e] += mine[(g * SUMS + e) * GROUP];
    }
#pragma unroll
    for (int m = 0; m < 2 * MM; m++) {
        const int t = t0 + tw + m * 8 + (lane >> 2);
        if (t >= s.w) continue;
#pragma unroll
        for (int j = 0; j < NN; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int n = n0 + nw + j * 8 + (lane & 3) * 2 + e;
                if (n >= F0C) continue;
                double y = acc[m >> 1][j][(m & 1) * 2 + e] + (double)bias[n];
                out[(i64)(s.z + t) * F0C + n] = y > 0 ? y : expm1(y);
            }
    }
}
#define F0_KERNEL(name, threads, ...) \
    KERNEL __launch_bounds__(threads) name(const Voc* vocs, const int4* tiles, int layer, const double* in, double* out, const double* w, const float* bias) { f0_layer<__VA_ARGS__>(vocs, tiles, layer, in, out, w, bias); }
F0_KERNEL(voc_f0_16x32, 512, 1, 1, 1, 4, 4, 64, 4)
F0_KERNEL(voc_f0_32x32, 128, 1, 2, 2, 2, 1, 64, 4)
F0_KERNEL(voc_f0_64x128, 256, 2, 4, 2, 4, 1, 32, 4)

// F0 of each frame: |x . w + b|. A warp a frame.
KERNEL voc_f0_out(const double* in, const float* w, float bias, float* f0, int rows) {
    dep_go();
    dep_wait();
    int r = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (r >= rows) return;
    double s = 0;
    for (int c = lane; c < F0C; c += 32) s = fma(in[(i64)r * F0C + c], (double)w[c], s);
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    if (lane == 0) f0[r] = (float)fabs(s + (double)bias);
}

// Tones of new frames. The phase is summed in double and every product rounded to single, as the reference does.
#define TONE_FRAMES 64
KERNEL __launch_bounds__(128) voc_tone(const Voc* vocs, const float* f0, const float* w, float rate, float threshold, float amp, float noise) {
    __shared__ float ph[TONE_FRAMES][HARM];
    dep_go();
    dep_wait();
    const Voc& v = vocs[blockIdx.x];
    if (!v.live) return;
    float2* ring = (float2*)v.tones;
    const int count = v.f0_to - v.f0_from;
    for (int base = 0; base < count; base += TONE_FRAMES) {
        int n = min(TONE_FRAMES, count - base);
        if (threadIdx.x < HARM) {
            double* sum = (double*)v.phase + threadIdx.x;
            double s = *sum;
            for (int t = 0; t < n; t++) {
                float turn = __fdiv_rn(__fmul_rn(f0[v.f0_row + base + t], (float)(threadIdx.x + 1)), rate);
                s += (double)(turn - truncf(turn));
                ph[t][threadIdx.x] = (float)s;
            }
            *sum = s;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < n * HARM; i += blockDim.x) {
            float p = ph[i / HARM][i % HARM];
            p = __fmul_rn(__fmul_rn(__fmul_rn(p, 2.f), 3.14159274101257324f), (float)FRAME);
            ph[i / HARM][i % HARM] = __fmul_rn(__fmul_rn(sinf(p), amp), w[i % HARM]);
        }
        __syncthreads();
        for (int t = threadIdx.x; t < n; t += blockDim.x) {
            bool voiced = f0[v.f0_row + base + t] > threshold;
            float tone = 0.f;
            if (voiced) for (int h = 0; h < HARM; h++) tone = __fadd_rn(tone, ph[t][h]);
            ring[(v.f0_from + base + t) & (RING - 1)] = make_float2(tone, voiced ? noise : amp / 3.f);
        }
        __syncthreads();
    }
}

// Columns of the source spectrum, from `reach` before the first new one; what lies before the stream is zero.
#define SP 128
KERNEL __launch_bounds__(SP) voc_spectrum(const Voc* vocs, const float* hiss, int hiss_len, const float* window, const float* basis, float bias, float* out, int reach) {
    __shared__ float s[SP * HOP + NFFT];
    __shared__ float b_s[ROWS * NFFT];
    for (int i = threadIdx.x; i < ROWS * NFFT; i += SP) b_s[i] = basis[i] * window[i % NFFT];
    dep_go();
    dep_wait();
    const Voc& v = vocs[blockIdx.y];
    if (!v.live) return;
    const float2* ring = (const float2*)v.tones;
    const int count = (v.to - v.from) * COLS + reach + 1, i0 = blockIdx.x * SP;
    if (i0 >= count) return;
    const int first = v.from * COLS - reach + i0, end = v.total * FRAME;
    for (int i = threadIdx.x; i < SP * HOP + NFFT; i += SP) {
        int t = first * HOP - NFFT / 2 + i;
        if (t < 0) t = -t;
        if (v.last && t >= end) t = 2 * (end - 1) - t;
        float x = 0.f;
        // t beyond what is known only feeds columns past the last
        if (t >= 0 && t < v.f0_to * FRAME) {
            float2 q = ring[(t / FRAME) & (RING - 1)];
            x = tanhf(q.x + (t < hiss_len ? hiss[t] : 0.f) * q.y + bias);
        }
        s[i] = x;
    }
    __syncthreads();
    int i = i0 + threadIdx.x;
    if (i >= count) return;
    float* o = out + (i64)(v.spec_row + i) * ROWS;
    bool before = first + (int)threadIdx.x < 0;
    for (int k = 0; k < ROWS; k++) {
        float a = 0.f;
#pragma unroll
        for (int n = 0; n < NFFT; n++) a = fmaf(b_s[k * NFFT + n], s[threadIdx.x * HOP + n], a);
        o[k] = before ? 0.f : a;
    }
}

// What source_downs multiplies: for each step of a stage its `kernel` columns, `stride` apart from step to step.
KERNEL voc_columns(const Voc* vocs, const int4* tiles, int bt, const float* spec, elt* out, int kernel, int stride, int ld, int reach, int steps) {
    dep_go();
    dep_wait();
    int4 s = tiles[blockIdx.x];
    if (s.x < 0) return;
    const Voc& v = vocs[s.x];
    int n = min(bt, s.w - s.y);
    // absolute first step of this sequence; at the last rate one more step precedes the first
    int t_abs = v.from * steps + (stride == 1 && v.from > 0 ? 1 : 0);
    for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < n * ld; i += blockDim.x * gridDim.y) {
        int t = s.y + i / ld, c = i % ld, j = c / ROWS;
        float x = 0.f;
        if (j < kernel) {
            int col = (t_abs + t) * stride + j - (stride - 1);
            x = spec[(i64)(v.spec_row + col - (v.from * COLS - reach)) * ROWS + c % ROWS];
        }
        out[(i64)(s.z + t) * ld + c] = to_e(x);
    }
}

// What conv_pre multiplies: each frame and those after it.
KERNEL voc_frames(const Voc* vocs, elt* out, int ahead, int ld) {
    dep_go();
    dep_wait();
    const Voc& v = vocs[blockIdx.y];
    int t = blockIdx.x;
    if (!v.live || t >= v.to - v.from) return;
    for (int i = threadIdx.x; i < ld; i += blockDim.x)
        out[(i64)(v.row + t) * ld + i] = to_e(i < (ahead + 1) * MEL ? mel_at(v, v.from + t + i / MEL, i % MEL) : 0.f);
}

// x = upsampled + source, and what the first convolution of each residual block takes. At the last rate of a stream
// that starts here one reflected step comes first.
KERNEL voc_merge(const Voc* vocs, const int4* tiles, int bt, const float* up, const float* si, float* x, elt* a0, elt* a1, elt* a2, const float* al0, const float* al1, const float* al2, int c, int top, int rate) {
    dep_go();
    dep_wait();
    int4 s = tiles[blockIdx.x];
    if (s.x < 0) return;
    const Voc& v = vocs[s.x];
    int n = min(bt, s.w - s.y), half = c >> 1;
    for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < n * half; i += blockDim.x * gridDim.y) {
        int t = s.y + i / half, ch = i % half * 2;
        int src = top && v.from == 0 ? (t == 0 ? 1 : t - 1) : t;
        float2 u = *(const float2*)(up + ((i64)v.row * rate + src) * c + ch);
        i64 o = (i64)(s.z + t) * c + ch;
        float2 z = *(const float2*)(si + o);
        u.x += z.x; u.y += z.y;
        *(float2*)(x + o) = u;
        store2(a0 + o, snake(u.x, al0[ch]), snake(u.y, al0[ch + 1]));
        if (a1) store2(a1 + o, snake(u.x, al1[ch]), snake(u.y, al1[ch + 1]));
        if (a2) store2(a2 + o, snake(u.x, al2[ch]), snake(u.y, al2[ch + 1]));
    }
}

// Samples by the inverse transform of columns [rows, ld], and the columns that the next call needs again. A column is
// part of NFFT samples: each turn of a block takes the exponentials and angles of its columns once.
#define TURN 256
#define TURN_COLUMNS ((TURN + HOP - 1) / HOP + NFFT / HOP)
KERNEL __launch_bounds__(TURN) voc_samples(const Voc* vocs, const float* post, int ld, const float* window, float limit, float* pcm, int* bad) {
    __shared__ float mag_s[TURN_COLUMNS * BINS], cos_s[TURN_COLUMNS * BINS], sin_s[TURN_COLUMNS * BINS];
    __shared__ float2 turn_s[NFFT];
    if (threadIdx.x < NFFT) sincospif(2.f * (float)threadIdx.x / NFFT, &turn_s[threadIdx.x].y, &turn_s[threadIdx.x].x);
    dep_go();
    dep_wait();
    const Voc& v = vocs[blockIdx.y];
    if (!v.live) return;
    const float* hin = (const float*)v.post_in;
    const int begin = v.from == 0 ? 0 : v.from * COLS + 1; // first column of this call
    auto at = [&](int f, int k) { return f >= begin ? post[(i64)(v.top_row + f - begin) * ld + k] : hin[(f - begin + POST_KEEP) * ROWS + k]; };
    const int n0 = v.from == 0 ? 0 : (v.from - 1) * FRAME, n1 = v.last ? v.to * FRAME : (v.to - 1) * FRAME;
    const int columns = v.to * COLS + 1;
    for (int base = n0 + blockIdx.x * TURN; base < n1; base += gridDim.x * TURN) {
        const int f0 = max(0, (base + NFFT / 2 - NFFT + HOP) / HOP), f1 = min(columns - 1, (min(base + TURN, n1) - 1 + NFFT / 2) / HOP);
        __syncthreads();
        for (int i = threadIdx.x; i < (f1 - f0 + 1) * BINS; i += TURN) {
            int f = f0 + i / BINS, k = i % BINS;
            mag_s[i] = fminf(expf(at(f, k)), 100.f);
            sincosf(sinf(at(f, BINS + k)), &sin_s[i], &cos_s[i]);
        }
        __syncthreads();
        const int n = base + threadIdx.x;
        if (n >= n1) continue;
        int p = n + NFFT / 2; // position before the padding is cut off
        int fa = max(0, (p - NFFT + HOP) / HOP), fb = min(columns - 1, p / HOP);
        float sum = 0.f, norm = 0.f;
        for (int f = fa; f <= fb; f++) {
            int m = p - f * HOP;
            float w = window[m], a = 0.f;
#pragma unroll
            for (int k = 0; k < BINS; k++) {
                const int i = (f - f0) * BINS + k;
                float mag = mag_s[i], cs = cos_s[i];
                float2 c = turn_s[(k * m) % NFFT];
                a += k == 0 || k == NFFT / 2 ? mag * cs * c.x : 2.f * (mag * (cs * c.x - sin_s[i] * c.y));
            }
            sum += a * (1.f / NFFT) * w;
            norm = fmaf(w, w, norm);
        }
        float x = sum / norm;
        if (!(fabsf(x) < 1e30f)) bad[blockIdx.y] = 1;
        pcm[v.pcm_row + n - n0] = fminf(fmaxf(x, -limit), limit);
    }
    if (blockIdx.x == 0) {
        float* hout = (float*)v.post_out;
        for (int i = threadIdx.x; i < POST_KEEP * ROWS; i += blockDim.x) {
            int f = columns - POST_KEEP + i / ROWS;
            hout[i] = f >= 0 && f >= begin - POST_KEEP ? at(f, i % ROWS) : 0.f;
        }
    }
}
