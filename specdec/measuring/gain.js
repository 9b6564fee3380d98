// Whether drafts pay, from the answers of a session.
"use strict";

const MIN_PROMPTS = 3; // an interval over two prompts says nothing
// Quantiles 0.975 of Student's t with 2 .. 10 degrees of freedom; from there on a series.
const T_QUANTILES = [4.3, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23];
const quantile = freedom => T_QUANTILES[freedom - 2] ?? 1.96 + 2.37 / freedom + 2.8 / freedom ** 2;

// Yes, no or unsure, and a sentence. answers: [{prompt, speedup}]; those to one prompt count once, by the mean of
// their logarithms.
function describeGain(answers) {
  const logs = new Map();
  for (const {prompt, speedup} of answers) logs.set(prompt, [...(logs.get(prompt) ?? []), Math.log(speedup)]);
  const mean = values => values.reduce((sum, value) => sum + value, 0) / values.length;
  const values = [...logs.values()].map(mean), num = values.length;
  if (num < MIN_PROMPTS) return ["unsure", num ? `Not sure yet whether drafts pay: ${num} of at least ${MIN_PROMPTS} prompts.` : ""];
  const centre = mean(values), squares = values.map(value => (value - centre) ** 2);
  const error = Math.sqrt(mean(squares) / (num - 1)), half = quantile(num - 1) * error;
  const [value, low, high] = [centre, centre - half, centre + half].map(Math.exp).map(figure => figure.toFixed(2));
  const figures = `${value} times as fast (${low} .. ${high}) over ${num} prompts of this session`;
  if (half < Math.abs(centre)) return [centre > 0 ? "yes" : "no", `Certain: with drafts ${figures}.`];
  const needed = Math.max(num + 1, Math.ceil(num * (1.96 * error / centre) ** 2));
  return ["unsure", `Not sure yet: with drafts ${figures}. ${needed <= 100 ? `About ${needed}` : "More than 100"} prompts would tell.`];
}
