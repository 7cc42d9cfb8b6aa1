// Hopper's bulk copies, clusters and warpgroup MMAs: what gemv.cu, warpgroup.cu and narrow.cu share.
#if ELT != 0 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Barriers in shared memory, and copies that count on them.
DEV void bar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
DEV void bar_expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
DEV void bar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEV void bar_wait(u32 bar, u32 parity) {
    u32 done;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    } while (!done);
}
DEV void bulk_copy(u32 dst, const void* src, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(dst), "l"(src), "r"(bytes), "r"(bar) : "memory");
}
// Every thread of every block of the cluster: what was written to shared memory before is seen after.
DEV void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same place in the shared memory of block `rank` of the cluster.
DEV u32 peer(u32 addr, u32 rank) {
    u32 r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(addr), "r"(rank));
    return r;
}
DEV float4 peer_load4(u32 addr) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(addr) : "memory");
    return v;
}
DEV void group_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the last so many groups have ended.
template <int LEFT = 0> DEV void group_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
#if ELT == 1
#define GROUP_TYPES "f32.bf16.bf16"
#else
#define GROUP_TYPES "f32.f16.f16"
#endif
// clang-format off
#define F4(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define F16(c, i) F4(c, i), F4(c, i + 4), F4(c, i + 8), F4(c, i + 12)
// c (+)= a * b: 64 x N over 16 inputs; a and b describe shared memory.
template <int N> DEV void group_mma(float* c, u64 a, u64 b, bool add) {
    if constexpr (N == 32)
        asm volatile("{.reg .pred p; setp.ne.b32 p, %18, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n32k16." GROUP_TYPES " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, p, 1, 1, 0, 0;}"
            : F16(c, 0) : "l"(a), "l"(b), "r"((int)add));
    else if constexpr (N == 48)
        asm volatile("{.reg .pred p; setp.ne.b32 p, %26, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n48k16." GROUP_TYPES " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
            "%16,%17,%18,%19,%20,%21,%22,%23}, %24, %25, p, 1, 1, 0, 0;}"
            : F16(c, 0), F4(c, 16), F4(c, 20) : "l"(a), "l"(b), "r"((int)add));
    else if constexpr (N == 64)
        asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16." GROUP_TYPES " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
            "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, p, 1, 1, 0, 0;}"
            : F16(c, 0), F16(c, 16) : "l"(a), "l"(b), "r"((int)add));
    else
        asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k16." GROUP_TYPES " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
            "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,"
            "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, p, 1, 1, 0, 0;}"
            : F16(c, 0), F16(c, 16), F16(c, 32), F16(c, 48) : "l"(a), "l"(b), "r"((int)add));
}
// The same of 64 x 64 with a in registers: of each warp sixteen rows, as an operand of `mma`. TURNED: b describes inputs by outputs.
template <int TURNED> DEV void group_mma_rows(float* c, uint4 a, u64 b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16." GROUP_TYPES " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, %38;}"
        : F16(c, 0), F16(c, 16) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"((int)add), "n"(TURNED));
}
// clang-format on
#endif
