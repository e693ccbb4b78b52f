"""Energy-aware MetaSchedule: `tune_tir`, `tune_relax` and `options` for scripts that already tune."""
