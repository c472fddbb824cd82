"""Logits of exported folders, by whatever version of transformers is installed: `python logits_of_folders.py WHAT.pt OUT.pt`.

WHAT holds a list of (folder, arguments of the model); OUT gets the version and a list of logits. Nothing of the trainer is imported.
"""

import sys

import torch
import transformers


def main(what: str, out: str) -> None:
    found = []
    for folder, given in torch.load(what):
        settings = transformers.AutoConfig.from_pretrained(folder)
        model = getattr(transformers, settings.architectures[0]).from_pretrained(
            folder, attn_implementation="eager", torch_dtype=torch.float32
        )
        known = {k: v for k, v in given.items() if k != "mm_token_type_ids" or transformers.__version__ >= "5"}
        with torch.no_grad():
            found.append(model(**known).logits)
    torch.save((transformers.__version__, found), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
