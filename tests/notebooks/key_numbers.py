"""The numbers that each notebook tells of, as a last cell with assertions on its variables."""

KEY_NUMBERS = {
    "01_quickstart": """
small, small_muonh, kept, law, muonh = last.values()
assert 1.5 * law < kept < 4 * law, last
assert 1.5 * muonh < law, last
assert abs(muonh / small - 1) < 0.2, last
assert 1.5 * small_muonh < muonh < 2 * law < 4 * small, last
assert largest < 1e-5, largest
""",
    "02_bert_lans": """
assert losses[-1] < 2.3 < entropy < losses[0], (losses, entropy)
assert accuracies[-1] > 0.42, accuracies
assert all(np.all(np.isfinite(own)) for own in history.values())
assert runs["adamw"][2][0][-1] < entropy, runs["adamw"][2]
assert of_momentum["layers/up/kernel"].shape == (STEPS, 4)
""",
    "03_many_devices": """
assert len(differences) == 7, differences
for name, value in differences.items():
    assert value > 0.1 if name in wrong else value < 1e-5, (name, value)
assert counts["lamb"] == counts["lamb, with partition_specs"] == 1, counts
assert counts["optax.lamb"] > 1, counts
""",
    "04_choose_your_batch_size": """
assert 10 < float(noise.noise_scale[-1]) < 1000
steady, swinging = (own[-30:].max() / own[-30:].min() for own in (losses, constant_losses))
assert steady < 1.1 < 1.3 < swinging, (steady, swinging)
assert 50 < fit.critical_batch_size < 1000, fit
assert not any(measured.at_edge), measured.summary()
assert measured.best_learning_rates == (0.005, 0.01, 0.01, 0.01), measured.summary()
nine, seven = (np.median(runs.steps, 2) for runs in (measured, lower))
assert seven[2, 3] < seven[2, 2] < 1.1 * seven[2, 3], seven
assert 1.2 < seven[3, 4] / seven[3, 3] < 1.6 < 1.8 < nine[3, 4] / nine[3, 2] < 2.4, (nine, seven)
""",
    "05_muon_on_eight_devices": """
assert not any("kernel" in name for name in moved_by_muon if "layers" in name), moved_by_muon
assert {"layers/up/bias", "embed/embedding", "head/kernel"} <= set(moved_by_muon), moved_by_muon
assert max(differences.values()) < 1e-5, differences
assert exchanged["optax.contrib.muon"]["all-gather"] > 4, exchanged
for name, reductions in {"muon, told": 0, "muonh, told": 2}.items():
    others = {"all-gather": 0, "all-reduce": reductions}
    assert exchanged[name] == {"all-to-all": 6} | others, exchanged
for name, peaks in PEAKS.items():
    assert peaks[1] == min(peaks, key=lambda peak: last_loss[name, peak]), last_loss
least = {name: last_loss[name, peaks[1]] for name, peaks in PEAKS.items()}
assert least["adamw"] - max(least["muon"], least["muonh"]) > 0.25, least
worst = {name: max(last_loss[name, peak] for peak in PEAKS[name]) for name in ("muon", "muonh")}
assert max(worst.values()) < least["adamw"], (worst, least)
assert distance < 1e-4, distance
""",
}
