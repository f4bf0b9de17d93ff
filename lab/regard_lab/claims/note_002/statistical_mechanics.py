"""Softmax as the Boltzmann distribution of energies −z: F = U − T·S, and heat capacity as a variance."""

import torch

import regard
from regard_lab.claim import Figure, below, claim, conclude, gap

TEMPERATURES = [0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0]


def thermodynamics(z, t):
    """Return F = −T·logsumexp(z/T), U = −⟨z⟩, S, C = Var(z)/T²."""
    w = regard.softmax(z, temperature=t)
    u = -(w * z).sum()
    s = regard.statistics.of_scores(z[None] / t).entropy[0]
    return -t * regard.logsumexp(z, temperature=t), u, s, (w * (z + u) ** 2).sum() / t**2


@claim(
    statement="Softmax is the Boltzmann distribution: free energy, energy, entropy, and the heat capacity as a "
    "variance.",
    derivation=[
        r"w_i = e^{-E_i/T}/Z,\; E_i = -z_i, \quad F = -T \ln Z = U - T S",
        r"U = \langle E \rangle, \quad S = -\partial F/\partial T, \quad C = \frac{dU}{dT} = "
        r"\frac{\mathrm{Var}(E)}{T^2}",
    ],
    rule="Holds if F = U − TS, S = −dF/dT and C = Var(E)/T² at eleven temperatures.",
)
def measure(sampler):
    z = sampler.normal(12).double()
    t, step = torch.tensor(TEMPERATURES, dtype=torch.float64), 1e-4
    now, warmer, colder = (
        torch.tensor([thermodynamics(z, x * (1 + h)) for x in TEMPERATURES], dtype=torch.float64).T
        for h in (0.0, step, -step)
    )
    f, u, s, c = now
    df, du = (warmer[:2] - colder[:2]) / (2 * step * t)
    series = {"entropy S": (TEMPERATURES, s), "heat capacity C": (TEMPERATURES, c)}
    return conclude(
        below("largest |C − dU/dT|", 1e-5, gap(c, du)),
        below("largest |F − (U − T·S)|", 1e-12, gap(f, u - t * s)),
        below("largest |S + dF/dT|", 1e-5, gap(s, -df)),
        remark="The section is empty in the note; this is what it would say.",
        alt=f"From temperature {TEMPERATURES[0]:g} to {TEMPERATURES[-1]:g} the entropy rises from {s[0]:.2f} to "
        f"{s[-1]:.2f} nats; the heat capacity is largest, {c.max():.2f}, at {TEMPERATURES[int(c.argmax())]:g}.",
        figure=Figure("lines", "temperature T", "per row, nats", series, log="x"),
    )
