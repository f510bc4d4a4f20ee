// The explorer.

export function start(_card) {}
