//! Charts as inline SVG, for a page that needs nothing from the network.

use std::fmt::Write as _;

/// One line of a chart.
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// Points by x.
    pub points: Vec<(f64, f64)>,
    /// Not ours: drawn dashed and grey.
    pub foreign: bool,
}

/// Styles of our own lines: by colour, dashes and the form of their points, so that any one of the three is enough.
const OWN: usize = 6;
/// Styles of others' lines.
const FOREIGN: usize = 3;

impl Series {
    /// Its class among `all`: `c0` on for ours, `f0` on for others'.
    fn class(n: usize, all: &[Series]) -> String {
        let before = all[..n].iter().filter(|other| other.foreign == all[n].foreign).count();
        if all[n].foreign { format!("foreign f{}", before % FOREIGN) } else { format!("c{}", before % OWN) }
    }
}

/// A point of `class`: circle, square, triangle, triangle upside down, bar or diamond, by the digit at its end.
fn mark(class: &str, x: f64, y: f64, title: &str) -> String {
    let form = class.chars().last().and_then(|c| c.to_digit(10)).unwrap_or(0);
    let title = if title.is_empty() { String::new() } else { format!("<title>{title}</title>") };
    match form {
        0 => format!("<circle class='dot {class}' cx='{x:.1}' cy='{y:.1}' r='4'>{title}</circle>"),
        1 => format!(
            "<rect class='dot {class}' x='{:.1}' y='{:.1}' width='7' height='7'>{title}</rect>",
            x - 3.5,
            y - 3.5
        ),
        2 => format!(
            "<polygon class='dot {class}' points='{x:.1},{:.1} {:.1},{:.1} {:.1},{:.1}'>{title}</polygon>",
            y - 5.0,
            x - 4.5,
            y + 4.0,
            x + 4.5,
            y + 4.0
        ),
        3 => format!(
            "<polygon class='dot {class}' points='{x:.1},{:.1} {:.1},{:.1} {:.1},{:.1}'>{title}</polygon>",
            y + 5.0,
            x - 4.5,
            y - 4.0,
            x + 4.5,
            y - 4.0
        ),
        4 => format!(
            "<rect class='dot {class}' x='{:.1}' y='{:.1}' width='11' height='4'>{title}</rect>",
            x - 5.5,
            y - 2.0
        ),
        _ => format!(
            "<polygon class='dot {class}' points='{x:.1},{:.1} {:.1},{y:.1} {x:.1},{:.1} {:.1},{y:.1}'>{title}</polygon>",
            y - 5.0,
            x + 5.0,
            y + 5.0,
            x - 5.0
        ),
    }
}

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 40.0;

/// Text made safe for HTML and attributes.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            _ => out.push(c),
        }
    }
    out
}

/// Lines over a common x axis; `limit` draws a line not to cross. The y axis is logarithmic when `log`.
pub fn lines(title: &str, x_label: &str, y_label: &str, series: &[Series], limit: Option<f64>, log: bool) -> String {
    let all = || series.iter().flat_map(|s| s.points.iter());
    let x_max = all().map(|p| p.0).fold(1.0, f64::max);
    let y_values = || all().map(|p| p.1).chain(limit).filter(|y| y.is_finite());
    let y_max = nice(y_values().fold(1e-9, f64::max));
    let least = y_values().filter(|y| *y > 0.0).fold(y_max, f64::min);
    let y_min = if log { 10f64.powf(least.log10().floor()) } else { 0.0 };
    let y_max = if log { 10f64.powf(y_max.log10().ceil()) } else { y_max };
    let x = |v: f64| LEFT + v / x_max * (WIDTH - LEFT - RIGHT);
    let y = |v: f64| {
        let share = if log {
            (v.max(y_min).log10() - y_min.log10()) / (y_max.log10() - y_min.log10()).max(1e-9)
        } else {
            v / y_max
        };
        HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
    };
    let mut svg = open(title, HEIGHT).replacen("<svg ", "<svg class='plot' ", 1);
    let ticks: Vec<f64> = if log {
        (y_min.log10().round() as i32..=y_max.log10().round() as i32).map(|e| 10f64.powi(e)).collect()
    } else {
        (0..=4).map(|n| y_max * f64::from(n) / 4.0).collect()
    };
    for tick in ticks {
        let _ = write!(
            svg,
            "<line class='grid' x1='{LEFT}' x2='{:.1}' y1='{:.1}' y2='{:.1}'/><text class='tick' x='{:.1}' y='{:.1}' text-anchor='end'>{}</text>",
            WIDTH - RIGHT,
            y(tick),
            y(tick),
            LEFT - 6.0,
            y(tick) + 4.0,
            number(tick)
        );
    }
    let mut xs: Vec<f64> = all().map(|p| p.0).collect();
    xs.sort_by(f64::total_cmp);
    xs.dedup();
    let mut last = f64::NEG_INFINITY;
    for tick in xs.into_iter().filter(|t| {
        let keep = x(*t) - last > 24.0;
        if keep {
            last = x(*t);
        }
        keep
    }) {
        let _ = write!(
            svg,
            "<text class='tick' x='{:.1}' y='{:.1}' text-anchor='middle'>{}</text>",
            x(tick),
            HEIGHT - BOTTOM + 16.0,
            number(tick)
        );
    }
    axis_names(&mut svg, x_label, y_label);
    if let Some(limit) = limit {
        let _ = write!(
            svg,
            "<line class='limit' x1='{LEFT}' x2='{:.1}' y1='{:.1}' y2='{:.1}'/>",
            WIDTH - RIGHT,
            y(limit),
            y(limit)
        );
    }
    for (n, s) in series.iter().enumerate() {
        let path: Vec<String> =
            s.points.iter().filter(|p| p.1.is_finite()).map(|p| format!("{:.1},{:.1}", x(p.0), y(p.1))).collect();
        let class = Series::class(n, series);
        let _ = write!(svg, "<polyline class='line {class}' points='{}'/>", path.join(" "));
        for point in s.points.iter().filter(|p| p.1.is_finite()) {
            let title = format!("{}: {} at {}", escape(&s.name), number(point.1), number(point.0));
            svg.push_str(&mark(&class, x(point.0), y(point.1), &title));
        }
    }
    svg.push_str("</svg>");
    let drawn = series.iter().enumerate().filter(|(_, s)| s.points.iter().any(|p| p.1.is_finite()));
    let names = drawn.map(|(n, s)| (s.name.clone(), Series::class(n, series)));
    figure(title, &svg, names)
}

/// Bars side by side: a name, a value, and whether it is ours.
pub fn bars(title: &str, unit: &str, rows: &[(String, f64, bool)]) -> String {
    let most = rows.iter().map(|r| r.1).fold(1e-9, f64::max);
    let height = 12.0 + rows.len() as f64 * 36.0;
    let mut svg = open(title, height);
    for (n, (name, value, ours)) in rows.iter().enumerate() {
        // The name stands above its bar: names of systems with their hardware are long.
        let y = 20.0 + n as f64 * 36.0;
        let width = value / most * (WIDTH - 90.0);
        let class = if *ours { "bar c0" } else { "bar foreign" };
        let _ = write!(
            svg,
            "<text class='tick' x='6' y='{:.1}'>{}</text><rect class='{class}' x='6' y='{y:.1}' width='{width:.1}' height='16'/><text class='tick' x='{:.1}' y='{:.1}'>{} {}</text>",
            y - 4.0,
            escape(&short(name, 90)),
            12.0 + width,
            y + 12.0,
            number(*value),
            escape(unit)
        );
    }
    svg.push_str("</svg>");
    figure(title, &svg, std::iter::empty())
}

/// Shares of a whole, one bar for each row.
pub fn stacks(title: &str, rows: &[(String, Vec<(String, f64)>)]) -> String {
    let mut names: Vec<String> = Vec::new();
    for (_, parts) in rows {
        for (name, _) in parts {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
    }
    let height = 12.0 + rows.len() as f64 * 26.0;
    let mut svg = open(title, height);
    for (n, (row, parts)) in rows.iter().enumerate() {
        let y = 6.0 + n as f64 * 26.0;
        let total: f64 = parts.iter().map(|p| p.1).sum();
        let _ = write!(svg, "<text class='tick' x='70' y='{:.1}' text-anchor='end'>{}</text>", y + 14.0, escape(row));
        let mut x = 78.0;
        for (name, value) in parts {
            let width = if total > 0.0 { value / total * (WIDTH - 94.0) } else { 0.0 };
            let colour = names.iter().position(|k| k == name).unwrap_or(0) % 6;
            let _ = write!(
                svg,
                "<rect class='bar c{colour}' x='{x:.1}' y='{y:.1}' width='{width:.1}' height='18'><title>{}: {:.1} %</title></rect>",
                escape(name),
                if total > 0.0 { value / total * 100.0 } else { 0.0 }
            );
            x += width;
        }
    }
    svg.push_str("</svg>");
    figure(title, &svg, names.iter().enumerate().map(|(n, name)| (name.clone(), format!("c{}", n % 6))))
}

/// Steps along a time axis: name, start, end (seconds). The axis ends at `until`; what goes on beyond it says so.
pub fn timeline(title: &str, steps: &[(String, f64, f64)], until: f64) -> String {
    let end = until.max(1e-6);
    let height = 44.0 + steps.len() as f64 * 26.0;
    let x = |t: f64| 200.0 + t / end * (WIDTH - 280.0);
    let mut svg = open(title, height);
    for (n, (name, from, to)) in steps.iter().enumerate() {
        let y = 6.0 + n as f64 * 26.0;
        let width = (x(to.min(end)) - x(*from)).max(2.0);
        let beyond = if *to > end { " →" } else { "" };
        let _ = write!(
            svg,
            "<text class='tick' x='194' y='{:.1}' text-anchor='end'>{}</text><rect class='bar c{}' x='{:.1}' y='{y:.1}' width='{width:.1}' height='18'/><text class='tick' x='{:.1}' y='{:.1}'>{:.1} ms{beyond}</text>",
            y + 14.0,
            escape(name),
            n % 6,
            x(*from),
            x(*from) + width + 4.0,
            y + 14.0,
            (to - from) * 1e3
        );
    }
    let base = height - 22.0;
    for n in 0..=4 {
        let t = end * f64::from(n) / 4.0;
        let _ = write!(
            svg,
            "<text class='tick' x='{:.1}' y='{:.1}' text-anchor='middle'>{:.0} ms</text>",
            x(t),
            base + 14.0,
            t * 1e3
        );
    }
    svg.push_str("</svg>");
    figure(title, &svg, std::iter::empty())
}

/// A number as short as it may be.
pub fn number(value: f64) -> String {
    let text = match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 1.0 || v == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    };
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

fn short(text: &str, most: usize) -> String {
    if text.chars().count() <= most { text.to_owned() } else { text.chars().take(most - 1).chain(['…']).collect() }
}

fn open(title: &str, height: f64) -> String {
    format!("<svg viewBox='0 0 {WIDTH} {height:.0}' role='img' aria-label='{}'>", escape(title))
}

fn axis_names(svg: &mut String, x_label: &str, y_label: &str) {
    let _ = write!(
        svg,
        "<text class='tick' x='{:.1}' y='{:.1}' text-anchor='middle'>{}</text><text class='tick' transform='translate(12 {:.1}) rotate(-90)' text-anchor='middle'>{}</text>",
        (LEFT + WIDTH - RIGHT) / 2.0,
        HEIGHT - 6.0,
        escape(x_label),
        (HEIGHT - BOTTOM + TOP) / 2.0,
        escape(y_label)
    );
}

fn figure(title: &str, svg: &str, legend: impl Iterator<Item = (String, String)>) -> String {
    let items: String = legend
        .map(|(name, class)| {
            let line =
                format!("<line class='line {class}' x1='1' x2='31' y1='6' y2='6'/>{}", mark(&class, 16.0, 6.0, ""));
            format!(
                "<span><svg class='key' viewBox='0 0 32 12' aria-hidden='true'>{line}</svg>{}</span> ",
                escape(&name)
            )
        })
        .collect();
    format!(
        "<figure><figcaption>{}</figcaption>{svg}<div class='legend'>{items}</div>\
         <button type='button' class='png'>PNG</button></figure>",
        escape(title)
    )
}

/// The next round number above.
fn nice(value: f64) -> f64 {
    let power = 10f64.powf(value.max(1e-9).log10().floor());
    [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|m| m * power).find(|v| *v >= value).unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_round_ones_are_above() {
        assert_eq!(["0", "0.0123", "1.5", "12.3", "1234"], [0.0, 0.0123, 1.5, 12.34, 1234.4].map(number)[..]);
        assert_eq!([0.03, 7.0, 20.0].map(nice).map(|v| (v * 1000.0).round()), [50.0, 10_000.0, 20_000.0]);
    }

    #[test]
    fn no_two_lines_of_a_chart_look_the_same() {
        let series = |foreign| Series { name: "s".into(), points: vec![(1.0, 1.0)], foreign };
        let all: Vec<Series> = [false, false, false, true, true].into_iter().map(series).collect();
        let classes: std::collections::BTreeSet<String> = (0..all.len()).map(|n| Series::class(n, &all)).collect();
        assert_eq!(classes.len(), all.len(), "{classes:?}");
        let chart = lines("t", "x", "y", &all, None, false);
        for form in ["<circle", "<rect", "<polygon"] {
            assert!(chart.contains(form), "{form}");
        }
    }

    #[test]
    fn text_cannot_break_out() {
        let chart = bars("<script>", "\"s'", &[("</svg><b>".into(), 1.0, true)]);
        assert!(!chart.contains("<script>") && !chart.contains("<b>"));
    }

    #[test]
    fn charts_of_nothing_are_still_charts() {
        for chart in
            [lines("t", "x", "y", &[], None, true), bars("t", "s", &[]), stacks("t", &[]), timeline("t", &[], 1.0)]
        {
            assert!(chart.contains("</svg>") && !chart.contains("NaN"), "{chart}");
        }
    }
}
