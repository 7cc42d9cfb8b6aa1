// What every kernel file starts with. Compiled by NVRTC, so no header may be included.
//
// ELT picks the type of operands and caches: 0 float, 1 bfloat16, 2 half. Sums are always float.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef ELT
#define ELT 1
#endif
#if ELT == 0
typedef float elt;
#else
typedef u16 elt;
#endif

#define DEV __device__ __forceinline__
#define KERNEL extern "C" __global__ void

// Programmatic dependent launch: `dep_wait` returns once everything before this kernel in the stream is
// complete and visible; `dep_go` lets the next kernel start its own prologue. No effect without the attribute. Before
// compute capability 9.0 there is neither, and the host launches without the attribute (target.rs): order is the stream's.
#if __CUDA_ARCH__ >= 900
DEV void dep_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEV void dep_go() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DEV void dep_wait() {}
DEV void dep_go() {}
#endif
// What no kernel writes, read here and now: the compiler moves other loads after the next `dep_wait`.
DEV uint4 load_ahead(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

#if ELT == 0
DEV float to_f(elt x) { return x; }
DEV elt to_e(float x) { return x; }
#elif ELT == 1
DEV float to_f(elt x) { return __uint_as_float(((u32)x) << 16); }
DEV elt to_e(float x) { u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }
DEV u32 pack2(float lo, float hi) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
DEV float2 unpack2(u32 x) { return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)); }
#else
DEV float to_f(elt x) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x)); return r; }
// Out of range saturates instead of becoming infinite; a NaN stays one.
DEV elt to_e(float x) { u16 r; asm("cvt.rn.satfinite.f16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }
DEV u32 pack2(float lo, float hi) { u32 r; asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
DEV float2 unpack2(u32 x) {
    float2 r;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(r.x), "=f"(r.y) : "r"(x));
    return r;
}
#endif

// Two neighbouring elements.
DEV void store2(elt* p, float a, float b) {
#if ELT == 0
    *(float2*)p = make_float2(a, b);
#else
    *(u32*)p = pack2(a, b);
#endif
}
DEV float2 load2(const elt* p) {
#if ELT == 0
    return *(const float2*)p;
#else
    return unpack2(*(const u32*)p);
#endif
}
// Eight neighbouring elements, aligned to 16 bytes.
struct Eight {
    uint4 a;
#if ELT == 0
    uint4 b;
#endif
};
DEV Eight load_raw(const elt* p) {
    Eight r;
    r.a = ((const uint4*)p)[0];
#if ELT == 0
    r.b = ((const uint4*)p)[1];
#endif
    return r;
}
DEV void expand(const Eight& r, float* v) {
#if ELT == 0
    v[0] = __uint_as_float(r.a.x); v[1] = __uint_as_float(r.a.y); v[2] = __uint_as_float(r.a.z); v[3] = __uint_as_float(r.a.w);
    v[4] = __uint_as_float(r.b.x); v[5] = __uint_as_float(r.b.y); v[6] = __uint_as_float(r.b.z); v[7] = __uint_as_float(r.b.w);
#else
    float2 a = unpack2(r.a.x), b = unpack2(r.a.y), c = unpack2(r.a.z), d = unpack2(r.a.w);
    v[0] = a.x; v[1] = a.y; v[2] = b.x; v[3] = b.y; v[4] = c.x; v[5] = c.y; v[6] = d.x; v[7] = d.y;
#endif
}

// Where (row, column) lies among tiled activations of `rows` rows (warpgroup.cu): [64 columns][row][64 values]. The values
// of a row are in the order in which a GEMM's fragments take them: of 32, the pair 4t + q is word t of piece q of
// four. Pieces of 16 bytes change places with the row, so that eight rows' pieces use all banks.
DEV i64 tiled(int rows, int row, int col) {
    int pair = (col & 31) >> 1, piece = ((col >> 5) & 1) * 4 + (pair & 3);
    return ((i64)(col >> 6) * rows + row) * 64 + ((piece ^ (row & 7)) << 3) + (pair >> 2) * 2 + (col & 1);
}

#if __CUDA_ARCH__ >= 890
// Two values in 8 bits (E4M3), the first in the lower half. Out of range saturates.
DEV u16 pack2_fp8(float lo, float hi) { u16 r; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo)); return r; }
#endif

DEV float warp_sum(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
}

DEV u32 smem_addr(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// Sixteen bytes to shared memory; zeros when `ok` is false.
DEV void cp16(u32 dst, const void* src, bool ok) {
    int n = ok ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(n));
}
// Four.
DEV void cp4(u32 dst, const void* src, bool ok) {
    int n = ok ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(n));
}
DEV void cp_commit() { asm volatile("cp.async.commit_group;"); }
template <int N> DEV void cp_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }

#if ELT != 0
#if ELT == 1
#define MMA_TYPES "bf16.bf16"
#else
#define MMA_TYPES "f16.f16"
#endif
DEV void mma(float* c, uint4 a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPES ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
DEV void ldm4(u32 addr, u32& a, u32& b, u32& c, u32& d) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(addr));
}
DEV void ldm4t(u32 addr, u32& a, u32& b, u32& c, u32& d) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(addr));
}
// Of a matrix of eight rows of eight values, two neighbours of a row a lane: the same of its columns.
DEV u32 transposed(u32 a) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
    return r;
}
#endif

#if ELT == 0
DEV float quotient(float a, float b) { return a / b; }
DEV float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
DEV float mish(float x) { float s = x > 20.f ? x : log1pf(expf(x)); return x * tanhf(s); }
DEV float gelu(float x) { return 0.5f * x * (1.f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x))); }
#else
// Results are rounded to 16 bits: the hardware's exponential and reciprocal are good to 22, and small code matters.
DEV float quotient(float a, float b) { return __fdividef(a, b); }
DEV float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }
// tanh(log(1 + e^x)) = n / (n + 2) with n = e^x (e^x + 2)
DEV float mish(float x) { float e = __expf(fminf(x, 20.f)), n = e * (e + 2.f); return x * __fdividef(n, n + 2.f); }
DEV float gelu(float x) {
    float u = 1.5957691216057308f * (x + 0.044715f * x * x * x);
    return x * __fdividef(1.f, 1.f + __expf(-u));
}
#endif
// sin(x) squared has period pi: one reduction in two pieces of pi, then the hardware sine, good to 1e-6 up to |x| of 1e4.
DEV float sin_sq(float x) {
#if ELT == 0
    float s = sinf(x);
#else
    float k = rintf(x * 0.318309886183790672f);
    float r = fmaf(-k, 3.14159274101257324f, x);
    r = fmaf(k, 8.74227765734758577e-8f, r);
    float s = __sinf(r);
#endif
    return s * s;
}
// `snake` for many values of one alpha: below 1e7, `turns` being alpha / pi and `gain` 1 / alpha.
struct Snake { float turns, gain; };
DEV Snake snake_of(float alpha) { return {alpha * 0.318309886183790672f, quotient(1.f, alpha + 1e-9f)}; }
DEV float snake(float x, Snake s) {
    const float whole = 12582912.f; // adding it leaves no fraction
    float r = fmaf(x, s.turns, -(fmaf(x, s.turns, whole) - whole));
    float v = __sinf(r * 3.14159265358979f);
    return fmaf(v * v, s.gain, x);
}
DEV float snake(float x, float alpha) { return x + quotient(sin_sq(alpha * x), alpha + 1e-9f); }
