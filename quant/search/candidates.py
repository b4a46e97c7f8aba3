"""Where the search of an affine group begins: the same for every implementation, bits and group size.

mx.quantize spreads the codes of a group from its smallest to its largest value. Moving an end by a part of a step changes how the
values fall between codes; drawing it in makes all steps smaller, for a larger error at that end. So both ends are moved, in
quarters of a step: from a quarter outwards to three quarters inwards. Each placement is judged by the least-squares fit to the
codes it gives (its scale and bias, not the placement's), and the best fit is refined by finding codes and fitting again, twice.

Squared error over mx.quantize's, 4 bits at groups of 64, mean of Gaussian, Student-t (5) and Laplace weights:

    ends moved by                        placements   error
    1/4 out … 3/4 in, by halves               9       0.802
    1/4 out … 3/4 in, by thirds              16       0.798
    1/4 out … 3/4 in, by quarters            25       0.796   chosen
    1/2 out … 1 in, by quarters              49       0.795
    a share of the range, 0 … 1/8            25       0.803
    a share of the range, 0 … 1/4            25       0.827
    a share of 0 … 0.15, judged as placed    16       0.824

Counted in steps, the best range hardly depends on the bits; as a share of the range it does. At 2 bits a whole step in would save
another 0.3 %. A third round of refinement saves less than 0.1 %.
"""

OFFSETS = (-0.25, 0.0, 0.25, 0.5, 0.75)
"""Steps by which an end is drawn in."""

DRAWN_IN = tuple((low, high) for low in OFFSETS for high in OFFSETS)
"""Steps by which the lower and the upper end are drawn in."""

ROUNDS = 2
"""Of refinement."""
