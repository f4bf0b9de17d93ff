"""Public bugs made again by somebody who had seen neither the checks nor the museum, each with a sound twin."""
