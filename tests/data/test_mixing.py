import pytest
import torch
from expecting import error

from vitkernels.data.device_transforms import DeviceTransforms
from vitkernels.data.mixing import MODES, Mixing, build_mixing
from vitkernels.data.randomness import Stream, seeded_globals

B, K, SIDE = 8, 10, 16

TARGETS = torch.arange(B)


def mix(mixing, images, targets, epoch, batch):
    """Draw and apply, as a worker and the device do."""
    soft, draws = mixing.draw(targets, images.shape[-1], epoch, batch)
    return DeviceTransforms()({"pixels": images, "targets": soft, **draws})


def ramp() -> torch.Tensor:
    """Row i is filled with the value i, so that a mixed row shows its ratio."""
    return torch.arange(B).float().view(B, 1, 1, 1).expand(B, 3, SIDE, SIDE).clone()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("alphas", [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_mixing__targets_contain_the_share_of_each_image(mode, alphas):
    mixing = Mixing(K, 0, mixup_alpha=alphas[0], cutmix_alpha=alphas[1], mode=mode)
    for batch in range(5):
        images, targets = mix(mixing, ramp(), TARGETS, 0, batch)
        assert images.dtype == targets.dtype == torch.float32
        assert targets.shape == (B, K)
        torch.testing.assert_close(targets.sum(1), torch.ones(B))
        # The mean of row i is share_i · i + share_partner · partner, whether blended or cut.
        shares = targets[:, :B] @ torch.arange(B).float()
        torch.testing.assert_close(images.mean((1, 2, 3)), shares, atol=1e-4, rtol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("settings", [{}, {"cutmix_minmax": (0.2, 0.8)}, {"prob": 0.5}, {"mixup_alpha": 0.0}])
def test_mixing__equals_timm_bit_for_bit(mode, settings):
    images, targets = torch.randn(B, 3, SIDE, SIDE), torch.randint(K, (B,))
    mixing = Mixing(K, 3, mode=mode, **settings)
    for batch in range(20):
        with seeded_globals(3, Stream.MIX, 1, batch):
            expected = mixing.mixup(images.clone(), targets)
        for ours, timms in zip(mix(mixing, images, targets, 1, batch), expected, strict=True):
            assert torch.equal(ours, timms)


def test_mixing__batches_differ_and_repeat(same):
    def mixed(seed, epoch, batch):
        return mix(Mixing(K, seed), ramp(), TARGETS, epoch, batch)

    assert same([mixed(0, 1, 2)], [mixed(0, 1, 2)])
    for other in ((1, 1, 2), (0, 2, 2), (0, 1, 3)):
        assert not same([mixed(0, 1, 2)], [mixed(*other)])


def test_mixing__leaves_the_global_generators_unchanged(rng_state):
    before = rng_state()
    mix(Mixing(K, 0), ramp(), TARGETS, 0, 0)
    assert rng_state() == before


def test_off_epoch__keeps_targets_soft():
    mixing = Mixing(K, 0, off_epoch=2)
    assert mix(mixing, ramp(), TARGETS, 1, 0)[1].max() < 1
    for epoch in (2, 3):
        images, targets = mix(mixing, ramp(), TARGETS, epoch, 0)
        assert torch.equal(images, ramp())
        assert torch.equal(targets, torch.nn.functional.one_hot(TARGETS, K).float())
    assert mix(mixing, ramp(), TARGETS, 1, 0)[1].max() < 1  # an earlier epoch again: mixing keeps no state


@pytest.mark.parametrize("mode", MODES)
def test_missing_rows__stay_empty_with_unmixed_partners(mode):
    targets = TARGETS.clone()
    missing = [1, 3, 4]  # 3 and 4 are partners; the partner of 1 is 6
    targets[missing] = -100
    images = ramp()
    images[missing] = 0
    images, soft = mix(Mixing(K, 0, mode=mode), images, targets, 0, 0)
    assert not images[missing].any() and not soft[missing].any()
    torch.testing.assert_close(images[6], torch.full((3, SIDE, SIDE), 6.0))
    torch.testing.assert_close(soft[6], torch.nn.functional.one_hot(torch.tensor(6), K).float())
    torch.testing.assert_close(soft[[0, 2, 5, 7]].sum(1), torch.ones(4))
    assert soft[[0, 7]].max() < 1


def test_cutmix_minmax__limits_the_box():
    images, targets = mix(Mixing(K, 0, mixup_alpha=0, cutmix_minmax=[0.4, 0.6]), ramp(), TARGETS, 0, 0)
    partner_share = targets[0, B - 1].item()
    assert 0.3**2 <= partner_share <= 0.6**2
    assert ((images[0] == 0) | (images[0] == B - 1)).all()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("mixup_alpha", "abc"),
        ("prob", 2),
        ("switch_prob", -1),
        ("off_epoch", 1.5),
        ("cutmix_minmax", 3),
        ("cutmix_minmax", [0.8, 0.2]),
    ],
)
def test_mixing__refuses_invalid_values(setting, value):
    with error("data.value", setting=f"mixup.{setting}", value=value):
        build_mixing({setting: value}, num_classes=K, seed=0, batch_size=8)


@pytest.mark.parametrize(
    ("settings", "batch_size", "code", "fields"),
    [
        ({}, 7, "data.mixup", {"batch_size": 7}),
        ({"mixup_alpha": 0, "cutmix_alpha": 0}, 8, "data.mixup", {"mixup_alpha": 0, "cutmix_alpha": 0}),
        (True, 8, "data.value", {"setting": "mixup"}),
        (-1, 8, "data.value", {"setting": "mixup", "value": -1}),
        ({"mixup_alfa": 1.0}, 8, "unknown_name", {"name": "mixup_alfa", "near": ["mixup_alpha"]}),
        ({"mode": "pairs"}, 8, "unknown_name", {"name": "pairs", "near": ["pair"]}),
    ],
)
def test_mixing__refuses_settings_that_cannot_work(settings, batch_size, code, fields):
    with error(code) as refused:
        build_mixing(settings, num_classes=K, seed=0, batch_size=batch_size)
    found = {name: refused.value.fields[name] for name in fields}
    assert found | {"near": found.get("near", [])[:1]} == {"near": []} | fields


def test_build_mixing__number_is_answered_by_an_example():
    with error("data.value") as refused:
        build_mixing(-1, num_classes=K, seed=0, batch_size=8)
    assert str(refused.value) == "mixup=-1: expected null, or a mapping such as {mixup_alpha: 0.8, cutmix_alpha: 1.0}"


def test_build_mixing__none_disables_mixing():
    assert build_mixing(None, num_classes=K, seed=0, batch_size=7) is None
