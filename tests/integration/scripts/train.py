"""A script as people have them, that knows nothing of iobench: a Trainer, and a loop of its own.

Run in an empty directory. Prints losses; leaves checkpoints.
"""

import safetensors.torch
import torch
from torch import save
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


def small_model():
    set_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))


def train():
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(640).view(40, 16) % 61]
    for resume in (False, True):
        arguments = TrainingArguments(
            output_dir="trainer",
            max_steps=6 if resume else 4,
            save_steps=2,
            logging_steps=1,
            per_device_train_batch_size=4,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(model=small_model(), args=arguments, train_dataset=rows)
        trainer.train(resume_from_checkpoint=resume)
        print([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


def loop():
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        loss = model(input_ids=torch.arange(32).view(2, 16), labels=torch.ones(2, 16).long()).loss
        loss.backward()
        optimizer.step()
        print(loss.item())
        save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
    state = torch.load("last.pt", map_location=lambda storage, _: storage)
    safetensors.torch.save_model(model, "model.safetensors")
    again = safetensors.torch.load_file("model.safetensors")
    print(sum(float(tensor.double().sum()) for tensor in [*state["model"].values()]), len(again))


if __name__ == "__main__":
    train()
    loop()
    with open("stream.pt", "wb") as file:
        torch.save([1], file)
