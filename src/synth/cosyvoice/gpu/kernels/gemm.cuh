// What the kernels of gemm.cu, gemv.cu and warpgroup.cu share: the parameters of a GEMM and what follows its sums.
enum { ACT_NONE = 0, ACT_SNAKE = 1, ACT_LEAKY = 2, ACT_MISH = 3, ACT_SILU_GATE = 4, ACT_GELU = 5 };

struct Conv {
    const elt* x;        // [rows, ldx]
    const elt* w;        // packed
    const float* bias;   // [outputs] or null
    const int4* tiles;   // {sequence, first position, first row, length} per block, or null: one sequence of `rows`
    const u64* hist_in;  // per sequence, or null
    const u64* hist_out; // per sequence, or null
    const float* res;    // added before the activation: [rows, ldo]
    const float* post;   // added after the activation: [rows, ldo]
    const float* sum;    // running sum: (v + sum) * scale
    float* out;          // [rows, ldo] or null
    elt* oute;           // activated, [rows, lde] or null
    const float* alpha;  // snake
    const float* rowscale; // per row, or null
    i64 hist_off;        // elements into the history
    int ldx, ldo, lde, rows;
    int cin, taps, dil;  // channels per group, padded to 32
    int n, group;        // outputs padded to 16; outputs per group
    int act;
    float scale, slope;
    float eps;           // > 0: root mean square of the input row, over `kreal` values
    int kreal;
};

DEV float activate(int act, float slope, float alpha, float v) {
    switch (act) {
        case ACT_SNAKE: return snake(v, alpha);
        case ACT_LEAKY: return v >= 0.f ? v : v * slope;
        case ACT_MISH: return mish(v);
        case ACT_GELU: return gelu(v);
        default: return v;
    }
}

// What is added to outputs n and n+1 of one row before anything else happens to them.
struct Added { float2 bias, res; };
DEV Added added(const Conv& p, int n, int row) {
    const float2 none = make_float2(0.f, 0.f);
    return {p.bias ? *(const float2*)(p.bias + n) : none, p.res ? *(const float2*)(p.res + (i64)row * p.ldo + n) : none};
}
// What is added later: `sum` or `post`, of which a GEMM has one at most.
DEV float2 added_late(const Conv& p, int n, int row) {
    const float* from = p.sum ? p.sum : p.post;
    return from ? *(const float2*)(from + (i64)row * p.ldo + n) : make_float2(0.f, 0.f);
}
DEV float2 alphas(const Conv& p, int n) { return p.alpha ? *(const float2*)(p.alpha + n) : make_float2(1.f, 1.f); }
// Outputs n and n+1 of one row.
DEV void epilogue(const Conv& p, int n, int row, float a, float b, float rs, Added add, float2 late, float2 al) {
    a *= rs;
    b *= rs;
    if (p.act == ACT_SILU_GATE) {
        p.oute[(i64)row * p.lde + (n >> 1)] = to_e(a * sigmoid(a) * b);
        return;
    }
    if (p.bias) { a += add.bias.x; b += add.bias.y; }
    i64 o = (i64)row * p.ldo + n;
    if (p.res) { a += add.res.x; b += add.res.y; }
    if (p.sum) { a = (a + late.x) * p.scale; b = (b + late.y) * p.scale; }
    float fa = a, fb = b;
    if (p.act != ACT_NONE) {
        fa = activate(p.act, p.slope, al.x, a);
        fb = activate(p.act, p.slope, al.y, b);
    }
    if (p.post) {
        a = fa + late.x; b = fb + late.y;
        fa = a; fb = b;
    }
    if (p.out) *(float2*)(p.out + o) = make_float2(a, b);
    if (p.oute) store2(p.oute + (i64)row * p.lde + n, fa, fb);
}
DEV void epilogue(const Conv& p, int n, int row, float a, float b, float rs) {
    epilogue(p, n, row, a, b, rs, added(p, n, row), added_late(p, n, row), alphas(p, n));
}

// The inputs' axis is cut into parts whose sums are added in order; of long inputs, two parts to each other before that.
#define SPLITS 16
#define SPLIT_CHUNKS(cin) ((((cin) + 63) / 64 + SPLITS - 1) / SPLITS)
DEV void add_parts(float& sum, float even, float odd, bool paired) {
    if (paired) { sum += even + odd; return; }
    sum += even;
    sum += odd;
}

#if ELT != 0
DEV uint4 lds(u32 addr) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(addr));
    return v;
}
DEV float squares(uint4 u, float s) {
    float2 v = unpack2(u.x); s = fmaf(v.x, v.x, s); s = fmaf(v.y, v.y, s);
    v = unpack2(u.y); s = fmaf(v.x, v.x, s); s = fmaf(v.y, v.y, s);
    v = unpack2(u.z); s = fmaf(v.x, v.x, s); s = fmaf(v.y, v.y, s);
    v = unpack2(u.w); s = fmaf(v.x, v.x, s); s = fmaf(v.y, v.y, s);
    return s;
}
#endif
