// Figures as a person says them. Everything unknown is a dash.

const known = (value) => typeof value === "number" && Number.isFinite(value);

export function watts(value) {
  if (!known(value)) return "–";
  return value >= 100 ? value.toFixed(0) : value >= 20 ? value.toFixed(1) : value.toFixed(2);
}

export function budget(value) {
  return known(value) ? `${Number(value.toPrecision(4))} W` : "no limit in watts";
}

export function duration(seconds) {
  if (!known(seconds)) return "–";
  const whole = Math.round(seconds);
  if (whole < 100) return `${whole} s`;
  if (whole < 6000) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  const minutes = Math.round(whole / 60);
  if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${(minutes / 1440).toFixed(1)} d`;
}

export function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const two = (n) => String(n).padStart(2, "0");
  const hours = Math.floor(whole / 3600);
  const rest = `${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
  return hours ? `${hours}:${rest}` : rest;
}

export function energy(joules) {
  if (!known(joules)) return "–";
  const hours = joules / 3600;
  if (hours >= 1000) return `${(hours / 1000).toPrecision(4)} kWh`;
  return hours >= 0.1 ? `${hours.toPrecision(3)} Wh` : `${joules.toPrecision(3)} J`;
}

export function count(value) {
  return known(value) ? Math.round(value).toLocaleString("en") : "–";
}

export function figure(value, digits = 4) {
  return known(value) ? String(Number(value.toPrecision(digits))) : "–";
}

export { known };
