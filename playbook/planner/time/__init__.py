"""Step time: what each part of a training step takes on a cluster, from measured efficiencies, published figures and data sheets."""
