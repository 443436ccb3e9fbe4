"""What has noise levels of its own."""

from flowalign.training import Trainer


def test_neighbours_that_fill_a_micro_batch_share_their_levels(tmp_path) -> None:
    """AWM's authors draw six levels for every two samples, 12 at a time."""
    config = {
        "model": {"path": "tiny_sd3", "lora": {"rank": 2}, "encode": {"max_sequence_length": 0}},
        "data": {"prompts": "shapes_train"},
        "rewards": [{"name": "shapes"}],
        "algorithm": {
            "name": "awm",
            "levels": {"name": "schedule", "count": 6, "end": 12, "stratified": True},
            "levels_of": "micro_batch",
        },
        "rollout": {"steps": 14},
        "training": {
            "iterations": 1,
            "prompts_per_iteration": 2,
            "group_size": 6,
            "updates_per_iteration": 1,
            "micro_batch_size": 12,
        },
        "output": str(tmp_path),
    }
    trainer = Trainer(config, progress=False)
    drawn = trainer.algorithm.drawn_levels(trainer.sampler, trainer.groups.draw(0).batch)
    assert drawn[::2].tolist() == drawn[1::2].tolist()
    assert len({tuple(row) for row in drawn.tolist()}) == 6
