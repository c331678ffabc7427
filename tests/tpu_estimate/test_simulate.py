"""Simulated schedules, written by hand so that their cycles can be counted."""

import pytest

from vitkernels.tpu_estimate.bundles import parse_bundles, parse_utilization
from vitkernels.tpu_estimate.chips import CHIPS
from vitkernels.tpu_estimate.simulate import simulate

CLOCK_HZ = CHIPS["v5e"].clock_hz

# Three trips of bundles 1 to 0xa. 819 granules are 26208 bytes: 48 cycles at 546 bytes a cycle.
LOOP = """= control target key start
LB: loop body
= control target key end

     0   :  { %s1_s0 = inlined_call_operand.hbm [shape: f32[8,128], index: 0] /* operand 0 */  ;;  %s2_s1 = smov 0 }
   0x1 LB: > { %s3_s1 = sphi %s2_s1, %s4_s1  ;;  %s5_s2 = scalar_lea.sflag [#allocation3], 1 } /* Start region 1 */
   0x2   : > { %7 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s1_s0, /*size_in_granules=*/819, /*vmem=*/%s9_s9, \
/*dst_syncflagno=*/%s5_s2 /*
window_bounds: (1, 32, 18)
 */ }
   0x3   : > { %8 = dma.done.wait %s5_s2, 819 /* pipeline-emitter-dma-wait */ }
   0x4   : > { %s4_s1 = sadd.s32 1, %s3_s1  ;;  %v1_v1 = vmatmul.bf16 %v2_v2, %v3_v3 }
   0x5   : > { %p6_p0 = scmp.ge.s32.totalorder %s4_s1, 3 }
   0x6   : > { %9 = sbr.rel (!%p6_p0) target bundleno = 1 (0x1), region = 1 }
   0x7   :  {}
   0x8   :  {}
   0x9   :  {}
   0xa   :  {}
   0xb   :  { %10 = vst [vmem:[#allocation2]] %v1_v1 }
"""
UTILIZATION = (
    """== CAPACTIY:
MXU, XLU, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL
    4     3     3     3     1     1
== UTILIZATION:
0 0 0 0 0 0
0 0 0 0 0 0
0 0 0 0 0 0
0 0 0 0 0 0
2 0 1 1 0 0
"""
    + "0 0 0 0 0 0\n" * 6
    + "0 0 0 0 1 1\n"
)


def straight(*bundles: str) -> str:
    lines = [f"  {hex(address)}   :  {{ {bundle} }}" for address, bundle in enumerate(bundles)]
    return "\n".join(lines).replace("0x0 ", "0 ", 1)


def copy(granules: int | str, predicate: str = "", how: str = "dma.hbm_to_vmem") -> str:
    sides = how.removeprefix("dma.").split("_to_")
    return (
        f"%1 = {how} [thread:$0]  {predicate}/*{sides[0]}=*/%s90_s9, /*size_in_granules=*/{granules}, "
        f"/*{sides[1]}=*/%s91_s10, /*dst_syncflagno=*/[#allocation7 + $0x1]"
    )


def test_simulate__loop_trip_count():
    schedule = simulate(LOOP, UTILIZATION)
    assert schedule.trustworthy
    assert schedule.bundles == 12
    assert schedule.issued == 1 + 3 * 10 + 1
    assert schedule.empty == 3 * 4
    assert (schedule.read, schedule.written) == (3 * 819 * 32, 0)
    assert schedule.stalled == 3 * (48 + 733 - 1)  # the wait is issued one bundle after the copy
    assert schedule.cycles == schedule.issued + schedule.stalled
    assert schedule.estimate_ms == schedule.cycles / CLOCK_HZ * 1e3
    assert schedule.busy["MXU"] == 3 * 2 / (4 * schedule.cycles)
    assert (schedule.fills, schedule.spills) == (3, 1)


def test_parse_bundles__by_address_without_comments():
    bundles = parse_bundles("   0   :  { %s1_s1 = smov 1 /* a */  ;;  %2 = sfence }\n   0x2 PF: > { %3 = sfence }\n")
    assert bundles == [("%s1_s1 = smov 1", "%2 = sfence"), (), ("%3 = sfence",)]
    with pytest.raises(ValueError):
        parse_bundles("nothing of the kind")


def test_simulate__utilization_is_optional():
    assert parse_utilization("") == ({}, [])
    assert simulate(LOOP).busy == {}


def test_simulate__copies_without_wait_count():
    schedule = simulate(straight(copy(8190), copy(8190, how="dma.vmem_to_hbm")))
    assert schedule.cycles == 1 + 2 * 480
    assert schedule.read == schedule.written == 8190 * 32
    assert schedule.memory_ms == pytest.approx(2 * 480 / CLOCK_HZ * 1e3)


def test_simulate__local_copy_uses_no_hbm():
    schedule = simulate(straight(copy(32, how="dma.vmem_to_vmem"), "%2 = dma.done.wait [#allocation7 + $0x1], 32"))
    assert (schedule.read, schedule.written) == (0, 0)
    assert schedule.stalled == 100 + 1 - 1


@pytest.mark.parametrize(
    ("setup", "granules"),
    [
        (["%p1_p0 = scmp.lt.s32.totalorder 1, 2", "%s2_s2 = smov (%p1_p0, 5), 7"], 7),
        (["%p1_p0 = scmp.lt.s32.totalorder 2, 1", "%s2_s2 = smov (%p1_p0, 5), 7"], 5),
        (["%p1_p0 = scmp.lt.s32.totalorder 1, 2", "%s2_s2 = smov (!%p1_p0, 5), 7"], 5),
        (["%p1_p0 = scmp.lt.u32.totalorder 4294967295, 1", "%s2_s2 = smov (%p1_p0, 5), 7"], 5),
        (["%9 = sdivrem.u32 17, 3", "%s2_s2 = spop.drf %9"], 5),
        (["%9 = sdivrem.u32 17, 3", "%s3_s3 = spop.drf %9", "%s2_s2 = spop.drf %9"], 2),
        (["%s3_s3 = smov 6", "%s2_s2 = sshll.u32 %s3_s3, 2"], 24),
        (["%s3_s3 = smov 9", "%9 = sst [smem:[#a + $0x1]] %s3_s3", "%s2_s2 = sld [smem:[#a + $0x1]]"], 9),
        # All instructions of a bundle read before any of them writes.
        (
            [
                "%s3_s3 = smov 3  ;;  %s4_s4 = smov 8",
                "%s5_s3 = smov %s4_s4  ;;  %s6_s6 = sadd.s32 %s3_s3, %s4_s4",
                "%s2_s2 = sadd.s32 %s5_s3, %s6_s6",
            ],
            8 + 3 + 8,
        ),
        (
            [
                "%p0_p1 = scmp.eq.s32.totalorder 1, 2",
                "%p1_p0 = pneg %p0_p1",
                "%s2_s2 = scalar_select /*predicate=*/%p1_p0, /*on_true=*/4, /*on_false=*/6",
            ],
            4,
        ),
    ],
)
def test_simulate__scalar_instructions(setup, granules):
    schedule = simulate(straight(*setup, copy("%s2_s2")))
    assert schedule.trustworthy, schedule.unknown
    assert schedule.read == granules * 32


@pytest.mark.parametrize(("predicate", "copies"), [("(%p1_p0), ", 1), ("(!%p1_p0), ", 0)])
def test_simulate__predicated_copy(predicate, copies):
    schedule = simulate(straight("%p1_p0 = scmp.eq.s32.totalorder 3, 3", copy(10, predicate)))
    assert schedule.read == copies * 320


def test_simulate__unknown_instruction_matters_only_if_used():
    odd = "%s2_s2 = sfrobnicate.s32 3, 4"
    assert simulate(straight(odd, copy(10))).trustworthy  # nothing depends on it
    schedule = simulate(straight(odd, copy("%s2_s2")))
    assert not schedule.trustworthy
    assert schedule.unknown == ("sfrobnicate.s32",)


@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        ("%1 = vpush %v1_v1  ;;  %s2_s2 = vpop.sfrf %1", "no scalar instruction defines"),
        ("%s2_s2 = sld [smem:[#allocation5]]", "does not write"),
        ("%s2_s2 = inlined_call_operand.<no memory space> [shape: s32[], index: 1]", "inlined_call_operand"),
    ],
)
def test_simulate__data_dependent_copy_size_is_not_guessed(setup, reason):
    schedule = simulate(straight(setup, copy("%s2_s2")))
    assert not schedule.trustworthy
    assert reason in " ".join(schedule.unknown)


def test_simulate__endless_loop_ends_at_limit():
    endless = straight("%1 = sbr.rel target bundleno = 0 (0x0), region = 1", *[""] * 4)
    schedule = simulate(endless, max_segments=100)
    assert not schedule.complete
    assert not schedule.trustworthy
