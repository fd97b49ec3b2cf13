"""PTX programs that copy, as templates for `str.format`."""

HEADER = ".version 8.6\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
COORDINATES = ", ".join(f".param .s32 c{i}" for i in range(5))

LOAD = """
.visible .entry {name}(.param .align 64 .b8 map[128], .param .u64 out, .param .u32 size,
    .param .u32 at, .param .u32 tx, {coordinates})
{{
  .reg .b32 %r<20>; .reg .b64 %rd<5>; .reg .pred %p<5>; .shared .align 8 .b64 bar;
  mov.u32 %r0, %tid.x; mov.u32 %r1, smem; ld.param.u32 %r2, [size]; shl.b32 %r3, %r0, 2;
FILL: add.u32 %r4, %r1, %r3; st.shared.u32 [%r4], 0xEEEEEEEE; add.u32 %r3, %r3, 128;
  setp.lt.u32 %p0, %r3, %r2; @%p0 bra FILL; setp.ne.u32 %p1, %r0, 0; mov.u32 %r5, bar;
  @!%p1 mbarrier.init.shared::cta.b64 [%r5], 1; fence.proxy.async; bar.sync 0; mov.u32 %r6, 0;
  {alone}
  ld.param.u32 %r7, [tx]; @!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r5], %r7;
  ld.param.u32 %r8, [at]; add.u32 %r8, %r1, %r8; mov.b64 %rd0, map; cvta.param.u64 %rd0, %rd0;
  ld.param.s32 %r10, [c0]; ld.param.s32 %r11, [c1]; ld.param.s32 %r12, [c2];
  ld.param.s32 %r13, [c3]; ld.param.s32 %r14, [c4];
  cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
    [%r8], [%rd0, {{{operands}}}], [%r5];
  @%p1 bra DONE; mov.u32 %r9, 0;
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r5], 0; selp.u32 %r6, 1, 0, %p2;
  add.u32 %r9, %r9, 1; setp.lt.u32 %p3, %r9, 3000; and.pred %p3, %p3, !%p2; @%p3 bra WAIT;
DONE: bar.sync 0; ld.param.u64 %rd1, [out]; cvta.to.global.u64 %rd1, %rd1; shl.b32 %r3, %r0, 2;
COPY: add.u32 %r4, %r1, %r3; ld.shared.u32 %r15, [%r4]; cvt.u64.u32 %rd2, %r3;
  add.u64 %rd2, %rd1, %rd2; st.global.u32 [%rd2], %r15; add.u32 %r3, %r3, 128;
  setp.lt.u32 %p0, %r3, %r2; @%p0 bra COPY; cvt.u64.u32 %rd3, %r2; add.u64 %rd3, %rd1, %rd3;
  @!%p1 st.global.u32 [%rd3], %r6; ret;
}}
"""

STORE = """
.visible .entry {name}({target}, .param .u64 in, .param .u32 size,
    .param .u32 at, {coordinates})
{{
  .reg .b32 %r<20>; .reg .b64 %rd<5>; .reg .pred %p<5>; mov.u32 %r0, %tid.x; mov.u32 %r1, smem;
  ld.param.u32 %r2, [size]; ld.param.u64 %rd1, [in]; cvta.to.global.u64 %rd1, %rd1;
  shl.b32 %r3, %r0, 2;
FILL: cvt.u64.u32 %rd2, %r3; add.u64 %rd2, %rd1, %rd2; ld.global.u32 %r15, [%rd2];
  add.u32 %r4, %r1, %r3; st.shared.u32 [%r4], %r15; add.u32 %r3, %r3, 128;
  setp.lt.u32 %p0, %r3, %r2; @%p0 bra FILL; fence.proxy.async; bar.sync 0;
  setp.ne.u32 %p1, %r0, 0;
  {alone}
  ld.param.u32 %r8, [at]; add.u32 %r8, %r1, %r8; ld.param.s32 %r10, [c0];
  ld.param.s32 %r11, [c1]; ld.param.s32 %r12, [c2]; ld.param.s32 %r13, [c3];
  ld.param.s32 %r14, [c4];
  {body}
  cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
DONE: ret;
}}
"""
ALONE = "@%p1 bra DONE;"
"""Lets only the first lane go on."""
STORE_TENSOR = """mov.b64 %rd0, map;
  cvta.param.u64 %rd0, %rd0;
  {opcode} [%rd0, {{{operands}}}], [%r8];"""

CP_ASYNC = """
.visible .entry {name}(.param .u64 in, .param .u64 counts, .param .u64 out, .param .u32 shift)
{{
  .reg .b32 %r<20>; .reg .b64 %rd<8>; .reg .pred %p<5>; mov.u32 %r0, %tid.x; mov.u32 %r1, smem;
  mul.lo.u32 %r3, %r0, {size}; add.u32 %r4, %r1, %r3; cvt.u64.u32 %rd2, %r3;
  ld.param.u64 %rd1, [counts]; cvta.to.global.u64 %rd1, %rd1; mul.wide.u32 %rd3, %r0, 4;
  add.u64 %rd1, %rd1, %rd3; ld.global.u32 %r5, [%rd1]; setp.eq.u32 %p0, %r5, 0;
  ld.param.u64 %rd1, [in]; cvta.to.global.u64 %rd1, %rd1; add.u64 %rd1, %rd1, %rd2;
  ld.param.u32 %r6, [shift]; cvt.u64.u32 %rd4, %r6; add.u64 %rd1, %rd1, %rd4;
  {opcode} [%r4], [%rd1], {operands}; cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;
  ld.param.u64 %rd1, [out]; cvta.to.global.u64 %rd1, %rd1; add.u64 %rd1, %rd1, %rd2;
  mov.u32 %r7, 0;
COPY: add.u32 %r8, %r4, %r7; ld.shared.u32 %r9, [%r8]; cvt.u64.u32 %rd5, %r7;
  add.u64 %rd5, %rd1, %rd5; st.global.u32 [%rd5], %r9; add.u32 %r7, %r7, 4;
  setp.lt.u32 %p1, %r7, {size}; @%p1 bra COPY; ret;
}}
"""

CLUSTER = """
.visible .entry {name}(.param .align 64 .b8 map[128], .param .u64 data, .param .u64 in,
    .param .u64 out, .param .u32 size, .param .u32 tx0, .param .u32 tx1)
    .explicitcluster .reqnctapercluster 2, 1, 1
{{
  .reg .b32 %r<30>; .reg .b64 %rd<9>; .reg .pred %p<6>; .reg .b16 %h<2>;
  .shared .align 8 .b64 bar; mov.u32 %r0, %tid.x; mov.u32 %r19, %cluster_ctarank;
  mov.u32 %r1, smem; mov.u32 %r5, bar; ld.param.u32 %r2, [size]; ld.param.u64 %rd1, [in];
  cvta.to.global.u64 %rd1, %rd1; mul.wide.u32 %rd2, %r19, %r2; add.u64 %rd1, %rd1, %rd2;
  ld.param.u64 %rd3, [out]; cvta.to.global.u64 %rd3, %rd3; add.u64 %rd3, %rd3, %rd2;
  ld.param.u64 %rd6, [data]; cvta.to.global.u64 %rd6, %rd6; mov.b64 %rd0, map;
  cvta.param.u64 %rd0, %rd0; shl.b32 %r3, %r0, 2;
FILL: cvt.u64.u32 %rd2, %r3; add.u64 %rd4, %rd1, %rd2; ld.global.u32 %r15, [%rd4];
  add.u32 %r4, %r1, %r3; st.shared.u32 [%r4], %r15; add.u32 %r3, %r3, 128;
  setp.lt.u32 %p0, %r3, %r2; @%p0 bra FILL; setp.ne.u32 %p1, %r0, 0; setp.ne.u32 %p4, %r19, 0;
  ld.param.u32 %r16, [tx0]; @%p4 ld.param.u32 %r16, [tx1]; setp.eq.u32 %p5, %r16, 0;
  @%p1 bra READY; mbarrier.init.shared::cta.b64 [%r5], 1; fence.mbarrier_init.release.cluster;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r5], %r16;
READY: fence.proxy.async; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
  @%p1 bra DONE; @%p4 bra WAIT; mapa.shared::cluster.u32 %r20, %r1, 1;
  mapa.shared::cluster.u32 %r21, %r5, 1; mov.b16 %h0, 3;
  {body}
WAIT: mov.u32 %r9, 0;
AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r5], 0; add.u32 %r9, %r9, 1;
  setp.lt.u32 %p3, %r9, 3000; and.pred %p3, %p3, !%p2; @%p3 bra AGAIN;
DONE: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; shl.b32 %r3, %r0, 2;
COPY: add.u32 %r4, %r1, %r3; ld.shared.u32 %r15, [%r4]; cvt.u64.u32 %rd2, %r3;
  add.u64 %rd5, %rd3, %rd2; st.global.u32 [%rd5], %r15; add.u32 %r3, %r3, 128;
  setp.lt.u32 %p0, %r3, %r2; @%p0 bra COPY; ret;
}}
"""

REPLACE = """
.visible .entry {name}(.param .u64 in, .param .u64 out)
{{
  .reg .b32 %r<9>; .reg .b64 %rd<5>; mov.u32 %r0, %tid.x; mov.u32 %r1, smem; shl.b32 %r3, %r0, 2;
  cvt.u64.u32 %rd2, %r3; add.u32 %r4, %r1, %r3; ld.param.u64 %rd1, [in];
  cvta.to.global.u64 %rd1, %rd1; add.u64 %rd1, %rd1, %rd2; ld.global.u32 %r5, [%rd1];
  st.shared.u32 [%r4], %r5; bar.sync 0; mov.u32 %r6, {low}; mov.u64 %rd3, {value};
  {opcode} [%r1], {operands}; bar.sync 0; ld.shared.u32 %r5, [%r4]; ld.param.u64 %rd1, [out];
  cvta.to.global.u64 %rd1, %rd1; add.u64 %rd1, %rd1, %rd2; st.global.u32 [%rd1], %r5; ret;
}}
"""
