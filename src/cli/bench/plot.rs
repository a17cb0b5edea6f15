//! Figures of links as a drawing: two panels, both axes logarithmic, a line for each provider.

use std::fmt::Write;

use shoal_actors::linkbench::LinkBenchRow;

use super::link::length;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 420.0;
const PANEL_WIDTH: f64 = 380.0;
const PANEL_HEIGHT: f64 = 290.0;
const TOP: f64 = 70.0;
const LEFTS: [f64; 2] = [70.0, 550.0];
/// Told apart by people who do not see all colours, too (Okabe and Ito).
const COLOURS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];

/// A range of powers of a base that holds values.
struct Axis {
    low: f64,
    high: f64,
}

impl Axis {
    /// From one power of `base` to another, so that all positive values lie between.
    fn over(values: impl Iterator<Item = f64>, base: f64) -> Self {
        let logs = values.filter(|value| value.is_finite() && *value > 0.0).map(|value| value.log(base));
        let (low, high) = logs.fold((f64::MAX, f64::MIN), |(low, high), log| (low.min(log), high.max(log)));
        if low > high {
            return Self { low: 0.0, high: base.ln() };
        }
        // A hair's breadth, because the logarithm of a power is not always whole.
        let (low, high) = ((low + 1e-9).floor(), (high - 1e-9).ceil());
        let high = if high <= low { low + 1.0 } else { high };
        Self { low: low * base.ln(), high: high * base.ln() }
    }

    /// Where a value lies, from 0 to 1.
    fn place(&self, value: f64) -> f64 {
        ((value.max(f64::MIN_POSITIVE).ln() - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
    }

    /// The powers of `base` on it.
    fn ticks(&self, base: f64) -> Vec<f64> {
        let first = (self.low / base.ln()).round() as i32;
        let last = (self.high / base.ln()).round() as i32;
        (first..=last).map(|power| base.powi(power)).collect()
    }
}

/// A drawing of the rows.
pub(super) fn svg(title: &str, rows: &[LinkBenchRow]) -> String {
    let mut providers: Vec<&str> = Vec::new();
    for row in rows {
        if !providers.contains(&row.provider.as_str()) {
            providers.push(&row.provider);
        }
    }
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\"><rect width=\"100%\" height=\"100%\" fill=\"white\"/>\
         <text x=\"70\" y=\"26\" font-size=\"16\">{}</text>",
        escape(title)
    );
    for (at, provider) in providers.iter().enumerate() {
        let x = 70.0 + 110.0 * at as f64;
        let colour = COLOURS[at % COLOURS.len()];
        let _ = write!(
            out,
            "<line x1=\"{x}\" y1=\"44\" x2=\"{}\" y2=\"44\" stroke=\"{colour}\" stroke-width=\"2\"/><text x=\"{}\" y=\"48\">{}</text>",
            x + 20.0,
            x + 26.0,
            escape(provider)
        );
    }
    let latency = |row: &LinkBenchRow| row.rtt_us_p50;
    let slowest = |row: &LinkBenchRow| row.rtt_us_p99;
    let bandwidth = |row: &LinkBenchRow| row.gib_per_s;
    let latencies: [(Figure<'_>, &str); 2] = [(&latency, ""), (&slowest, " stroke-dasharray=\"4 3\"")];
    panel(&mut out, LEFTS[0], "there and back, µs (dashed: 99 of 100 within)", rows, &providers, &latencies);
    panel(&mut out, LEFTS[1], "bandwidth, GiB/s", rows, &providers, &[(&bandwidth, "")]);
    out.push_str("</svg>\n");
    out
}

type Figure<'a> = &'a dyn Fn(&LinkBenchRow) -> f64;

fn panel(out: &mut String, left: f64, title: &str, rows: &[LinkBenchRow], providers: &[&str], figures: &[(Figure<'_>, &str)]) {
    let across = Axis::over(rows.iter().map(|row| f64::from(row.bytes)), 4.0);
    let up = Axis::over(figures.iter().flat_map(|(figure, _)| rows.iter().map(figure)), 10.0);
    let x = |bytes: f64| left + across.place(bytes) * PANEL_WIDTH;
    let y = |value: f64| TOP + (1.0 - up.place(value)) * PANEL_HEIGHT;
    let (bottom, right) = (TOP + PANEL_HEIGHT, left + PANEL_WIDTH);
    let _ = write!(out, "<text x=\"{left}\" y=\"{}\" font-weight=\"bold\">{title}</text>", TOP - 8.0);
    for value in up.ticks(10.0) {
        let at = y(value);
        let _ = write!(
            out,
            "<line x1=\"{left}\" y1=\"{at:.1}\" x2=\"{right}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{value}</text>",
            left - 6.0,
            at + 4.0
        );
    }
    for bytes in across.ticks(4.0) {
        let at = x(bytes);
        let _ = write!(
            out,
            "<line x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{bottom}\" stroke=\"#eee\"/>\
             <text transform=\"translate({:.1} {}) rotate(-45)\" text-anchor=\"end\">{}</text>",
            at + 4.0,
            bottom + 14.0,
            length(bytes as u32)
        );
    }
    let _ = write!(out, "<rect x=\"{left}\" y=\"{TOP}\" width=\"{PANEL_WIDTH}\" height=\"{PANEL_HEIGHT}\" fill=\"none\" stroke=\"#888\"/>");
    for (at, provider) in providers.iter().enumerate() {
        let colour = COLOURS[at % COLOURS.len()];
        for (figure, dashes) in figures {
            let mut line: Vec<(f64, f64)> =
                rows.iter().filter(|row| row.provider == *provider).map(|row| (f64::from(row.bytes), figure(row))).collect();
            line.sort_by(|one, other| one.0.total_cmp(&other.0));
            let points: Vec<String> = line.iter().map(|(bytes, value)| format!("{:.1},{:.1}", x(*bytes), y(*value))).collect();
            let points = points.join(" ");
            let _ = write!(out, "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dashes}/>");
        }
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(provider: &str, bytes: u32, us: f64, gib_per_s: f64) -> LinkBenchRow {
        LinkBenchRow { provider: provider.to_owned(), bytes, rtt_us_p50: us, rtt_us_p99: us * 2.0, gib_per_s }
    }

    #[test]
    fn points_lie_where_their_values_are() {
        let rows = [row("shm", 64, 1.0, 0.1), row("shm", 1024, 10.0, 10.0), row("a<b", 64, 100.0, 1.0)];
        let drawing = svg("Links & more", &rows);
        // Latency from 1 to 1000 µs (twice the slowest), sizes from 64 to 1024: the first point is the lower left corner, the
        // second one is at the right edge and a third of the way up.
        assert!(drawing.contains("points=\"70.0,360.0 450.0,263.3\""), "{drawing}");
        // Bandwidth from 0.1 to 10.
        assert!(drawing.contains("points=\"550.0,360.0 930.0,70.0\""), "{drawing}");
        assert!(drawing.contains("Links &amp; more") && drawing.contains("a&lt;b") && !drawing.contains("a<b"));
        assert!(drawing.contains(">64 B<") && drawing.contains(">1 KiB<"));
        assert_eq!((drawing.matches("<polyline").count(), drawing.matches("<svg").count(), drawing.matches("</svg>").count()), (6, 1, 1));
    }

    #[test]
    fn odd_figures_are_drawn_somewhere() {
        let drawing = svg("", &[row("x", 100, 0.0, f64::INFINITY), row("x", 100, 5.0, 1.0)]);
        assert!(!drawing.contains("NaN") && !drawing.contains("inf"), "{drawing}");
        assert!(svg("", &[]).ends_with("</svg>\n"));
    }
}
