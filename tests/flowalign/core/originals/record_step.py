"""Record one training step of TRL's GRPOTrainer, away from its reference: its completions, loss and gradient.

README.md says how.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import TrainerCallback

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from step import BETA, PROMPTS, model, moved, reward, tokenizer  # noqa: E402


def main() -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class Keep(TrainerCallback):
        gradients: dict[str, torch.Tensor] = {}
        step: dict[str, Any] = {}

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.gradients |= {name: p.grad.clone().contiguous() for name, p in model.named_parameters()}

    network = model()
    keep = Keep()
    start = {f"start.{name}": p.detach().clone().contiguous() for name, p in network.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        # TRL loads the reference from where the model came from
        network.save_pretrained(f"{folder}/model")
        network = moved(type(network).from_pretrained(f"{folder}/model"))
        weights = {f"weight.{name}": p.detach().clone().contiguous() for name, p in network.named_parameters()}
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=8,
            num_generations=4,
            max_steps=1,
            max_completion_length=10,
            beta=BETA,
            epsilon=0.2,
            epsilon_high=0.28,
            loss_type="dapo",
            temperature=0.8,
            max_grad_norm=1e9,
            learning_rate=1e-3,
            use_cpu=True,
            report_to=[],
            shuffle_dataset=False,
            gradient_checkpointing=False,
            bf16=False,
        )

        class Kept(GRPOTrainer):
            def compute_loss(self, model: Any, inputs: dict[str, Any], *more: Any, **settings: Any) -> torch.Tensor:
                loss = super().compute_loss(model, inputs, *more, **settings)
                rows = {key: inputs[key].tolist() for key in ("prompt_ids", "completion_ids", "completion_mask")}
                keep.step |= {"loss": loss.item(), **rows}
                return loss

        trainer = Kept(
            network,
            reward_funcs=lambda completions, **_: [reward(text) for text in completions],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tokenizer(),
            callbacks=[keep],
        )
        trainer.train()
    save_file(
        start | weights | {f"gradient.{k}": v for k, v in keep.gradients.items()},
        HERE / "step.safetensors",
    )
    (HERE / "step.json").write_text(json.dumps(keep.step) + "\n")


if __name__ == "__main__":
    main()
