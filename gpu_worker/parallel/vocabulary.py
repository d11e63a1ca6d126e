"""An embedding that is split by words over the ranks of a stage."""

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.parallel.group import Group


def look_up(group: Group, embedding: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    """Return the tokens' embeddings, (tokens, hidden), the same on each of the stage's ranks.

    Args:
        group: This rank's ties.
        embedding: (words, hidden), of this rank's words alone.
        token_ids: (tokens,) of any integer dtype, known on every rank of the stage.
        vocab_size: Words of all ranks together.
    """
    layout = group.layout
    if layout.tp == 1:
        return functional.embedding(token_ids, embedding)
    words = layout.columns(vocab_size)
    local = token_ids - words.start
    is_here = (local >= 0) & (local < len(words))
    # Each token is some rank's: of the others the sum has zeros.
    found = functional.embedding(torch.where(is_here, local, 0), embedding)
    return group.reduce(found * is_here.unsqueeze(1))
