"""Documents packed into one sequence, as captured calls and models pass them: see `regard._call.mask.documents`."""

from regard._call.mask.documents import document_mask, documents_of_positions, find_starts, recall

__all__ = ["document_mask", "documents_of_positions", "find_starts", "recall"]
