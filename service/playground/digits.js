/** The ten digits as a pen writes them, as examples: strokes of points, in fractions of the slate's shorter side. */

const BOX = 0.74; // fraction of the slate, in the middle

/** Part of an ellipse; angles in degrees, clockwise from the right. */
function arc(x, y, across, down, from, to) {
  return Array.from({ length: 25 }, (_, step) => {
    const angle = ((from + ((to - from) * step) / 24) * Math.PI) / 180;
    return [x + across * Math.cos(angle), y + down * Math.sin(angle)];
  });
}

const STROKES = {
  0: [arc(0.5, 0.5, 0.29, 0.44, -80, 280)],
  1: [[[0.58, 0.07], [0.51, 0.5], [0.44, 0.93]]],
  2: [[...arc(0.48, 0.3, 0.25, 0.23, -165, 45), [0.44, 0.68], [0.22, 0.9], [0.5, 0.9], [0.8, 0.89]]],
  3: [[...arc(0.46, 0.28, 0.24, 0.21, -150, 85), ...arc(0.46, 0.71, 0.28, 0.22, -85, 150)]],
  4: [[[0.34, 0.08], [0.26, 0.34], [0.21, 0.55], [0.5, 0.55], [0.82, 0.53]], [[0.68, 0.14], [0.66, 0.5], [0.62, 0.94]]],
  5: [[[0.38, 0.1], [0.34, 0.28], [0.31, 0.45], ...arc(0.46, 0.68, 0.27, 0.24, -115, 150)], [[0.38, 0.1], [0.58, 0.1], [0.78, 0.09]]],
  6: [[[0.64, 0.06], [0.42, 0.26], [0.28, 0.52], ...arc(0.5, 0.7, 0.24, 0.22, -170, 190)]],
  7: [[[0.2, 0.13], [0.5, 0.12], [0.79, 0.12], [0.7, 0.34], [0.56, 0.6], [0.44, 0.93]]],
  8: [[...arc(0.5, 0.29, 0.21, 0.2, 80, 430), ...arc(0.5, 0.71, 0.26, 0.22, -80, 275)]],
  9: [[...arc(0.48, 0.31, 0.23, 0.23, -25, -372), [0.7, 0.5], [0.67, 0.7], [0.61, 0.93]]],
};

/** The strokes of a class, or undefined unless the classes are the ten digits: a "3" among letters could be anything. */
export function strokesOf(label, classes) {
  if ([...classes].sort().join() !== Object.keys(STROKES).join()) return undefined;
  const place = (value) => 0.5 + (value - 0.5) * BOX;
  return STROKES[label]?.map((stroke) => stroke.map(([x, y]) => [place(x), place(y)]));
}
