// The playground.

export function start(_card) {}
