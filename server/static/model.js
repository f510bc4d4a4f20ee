// The model.

export function start(_card) {}
