// The live.

export function start(_card) {}
