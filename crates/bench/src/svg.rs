//! Plots of ratios, as SVG: a bar for each row, a whisker over its spread, and marks at its floor and its aim.
//!
//! Rows that stand for the same figure are neighbours and of one colour. The axis is linear from
//! zero, unless a bar is more than [`LINEAR_FACTOR_MAX`] times as long as the way to a mark: then
//! it is logarithmic and says so. Whiskers may leave it; the text beside a bar has their ends.
use crate::table::figure;
use std::fmt::Write;

/// Longest bar over nearest mark with which a linear axis can still be read.
const LINEAR_FACTOR_MAX: f64 = 12.0;
const LABEL_WIDTH_MIN: f64 = 200.0;
/// At most, of an ordinary letter.
const LETTER_WIDTH: f64 = 8.0;
const PLOT_WIDTH: f64 = 520.0;
const VALUE_WIDTH: f64 = 190.0;
const ROW_HEIGHT: f64 = 26.0;
const BAR_HEIGHT: f64 = 14.0;
/// More between the rows of two groups.
const GROUP_GAP: f64 = 8.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = 44.0;
const COLOURS: [&str; 2] = ["#4878a8", "#7aa6c2"];
const FLOOR: &str = "#c0392b";
const AIM: &str = "#1e8449";

#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Rows of one group stand together.
    pub group: String,
    pub label: String,
    /// `None`: it failed, and the plot says so.
    pub value: Option<f64>,
    pub least: Option<f64>,
    pub most: Option<f64>,
    pub floor: Option<f64>,
    pub aim: Option<f64>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Plot {
    pub title: String,
    /// Title of the axis.
    pub axis: String,
    pub rows: Vec<Row>,
}

fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            letter if letter.is_control() => out.push(' '),
            letter => out.push(letter),
        }
    }
    out
}

/// From values to places on the paper.
struct Axis {
    /// Where it begins, beyond the labels.
    left: f64,
    least: f64,
    most: f64,
    logarithmic: bool,
}

impl Axis {
    fn of(rows: &[Row]) -> Self {
        let longest = rows.iter().map(|row| row.label.chars().count()).max().unwrap_or(0);
        let left = (longest as f64 * LETTER_WIDTH + 20.0).max(LABEL_WIDTH_MIN);
        let good = |value: &f64| value.is_finite() && *value > 0.0;
        let values = || rows.iter().filter_map(|row| row.value).filter(good);
        let marks = || rows.iter().flat_map(|row| [row.floor, row.aim]).flatten().filter(good);
        let most = values().chain(marks()).fold(f64::NAN, f64::max);
        if most.is_nan() {
            return Self { left, least: 0.0, most: 1.0, logarithmic: false };
        }
        // Small bars before large marks can be read, small marks before large bars can't.
        let least = marks().fold(f64::NAN, f64::min);
        if least.is_nan() || most / least <= LINEAR_FACTOR_MAX {
            return Self { left, least: 0.0, most: most * 1.05, logarithmic: false };
        }
        let least = values().fold(least, f64::min);
        Self { left, least: 10f64.powf(least.log10().floor()), most: most * 1.2, logarithmic: true }
    }

    fn x(&self, value: f64) -> f64 {
        let share = if self.logarithmic {
            (value.max(self.least) / self.least).log10() / (self.most / self.least).log10()
        } else {
            (value - self.least) / (self.most - self.least)
        };
        self.left + share.clamp(0.0, 1.0) * PLOT_WIDTH
    }

    /// Round numbers.
    fn ticks(&self) -> Vec<f64> {
        if self.logarithmic {
            let decades = (0..12).map(|power| self.least * 10f64.powi(power));
            let steps: &[f64] = if self.most / self.least > 1e3 { &[1.0] } else { &[1.0, 2.0, 5.0] };
            let ticks = decades.flat_map(|decade| steps.iter().map(move |by| by * decade));
            return ticks.filter(|at| *at <= self.most).collect();
        }
        let rough = self.most / 6.0;
        let decade = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|by| by * decade).into_iter().find(|step| *step >= rough);
        let step = step.unwrap_or(10.0 * decade);
        (0..20).map(|count| f64::from(count) * step).take_while(|at| *at <= self.most).collect()
    }
}

/// `write!` into a string cannot fail.
macro_rules! put {
    ($out:expr, $($what:tt)*) => {{ let _ = writeln!($out, $($what)*); }};
}

impl Plot {
    /// A name for its file.
    pub fn file_name(&self) -> String {
        let letter = |letter: char| if letter.is_ascii_alphanumeric() { letter.to_ascii_lowercase() } else { '-' };
        let words: String = self.title.chars().map(letter).collect();
        let words: Vec<&str> = words.split('-').filter(|word| !word.is_empty()).collect();
        format!("{}.svg", words.join("-"))
    }

    /// The middle of each row, and the height of all.
    fn places(&self) -> (Vec<f64>, f64) {
        let (mut at, mut places) = (TOP, Vec::new());
        for (index, row) in self.rows.iter().enumerate() {
            if index > 0 && self.rows[index - 1].group != row.group {
                at += GROUP_GAP;
            }
            places.push(at + ROW_HEIGHT / 2.0);
            at += ROW_HEIGHT;
        }
        (places, at)
    }

    pub fn to_svg(&self) -> String {
        let axis = Axis::of(&self.rows);
        let (places, end) = self.places();
        let (width, height) = (axis.left + PLOT_WIDTH + VALUE_WIDTH, end + BOTTOM);
        let mut out = String::new();
        put!(
            out,
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">"#
        );
        put!(out, r#"<rect width="{width}" height="{height}" fill="white"/>"#);
        put!(out, r#"<g font-family="sans-serif" font-size="13" fill="black">"#);
        put!(out, r#"<text x="12" y="24" font-size="17">{}</text>"#, escaped(&self.title));
        let kind = if axis.logarithmic { ", logarithmic" } else { "" };
        put!(out, r#"<text x="12" y="44">{}{kind}</text>"#, escaped(&self.axis));
        legend(&mut out, width);
        for tick in axis.ticks() {
            let x = axis.x(tick);
            put!(out, r##"<line x1="{x:.1}" y1="{TOP}" x2="{x:.1}" y2="{end}" stroke="#dddddd"/>"##);
            put!(
                out,
                r#"<text x="{x:.1}" y="{:.1}" text-anchor="middle" font-size="11">{}</text>"#,
                end + 16.0,
                tick_label(tick)
            );
        }
        let mut colour = 0;
        for (index, (row, &middle)) in self.rows.iter().zip(&places).enumerate() {
            colour += usize::from(index > 0 && self.rows[index - 1].group != row.group);
            bar(&mut out, &axis, row, middle, COLOURS[colour % COLOURS.len()]);
        }
        put!(out, "</g>");
        put!(out, "</svg>");
        out
    }
}

fn tick_label(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn legend(out: &mut String, width: f64) {
    for (name, colour, x) in [("floor", FLOOR, width - 150.0), ("aim", AIM, width - 75.0)] {
        put!(out, r#"<rect x="{x:.1}" y="14" width="3" height="14" fill="{colour}"/>"#);
        put!(out, r#"<text x="{:.1}" y="26">{name}</text>"#, x + 8.0);
    }
}

fn bar(out: &mut String, axis: &Axis, row: &Row, middle: f64, colour: &str) {
    let baseline = middle + 4.5;
    let left = axis.left;
    let label_x = left - 8.0;
    put!(out, r#"<text x="{label_x}" y="{baseline:.1}" text-anchor="end">{}</text>"#, escaped(&row.label));
    let text_x = left + PLOT_WIDTH + 8.0;
    let Some(value) = row.value.filter(|value| value.is_finite()) else {
        put!(out, r#"<text x="{text_x}" y="{baseline:.1}" fill="{FLOOR}">failed</text>"#);
        return;
    };
    let top = middle - BAR_HEIGHT / 2.0;
    let length = axis.x(value) - left;
    put!(out, r#"<rect x="{left}" y="{top:.1}" width="{length:.1}" height="{BAR_HEIGHT}" fill="{colour}"/>"#);
    let mut text = figure(value);
    if let (Some(least), Some(most)) = (row.least, row.most) {
        let (from, to) = (axis.x(least), axis.x(most));
        put!(
            out,
            r#"<line x1="{from:.1}" y1="{middle:.1}" x2="{to:.1}" y2="{middle:.1}" stroke="black" stroke-width="1.5"/>"#
        );
        for x in [from, to] {
            let (high, low) = (middle - 4.0, middle + 4.0);
            put!(
                out,
                r#"<line x1="{x:.1}" y1="{high:.1}" x2="{x:.1}" y2="{low:.1}" stroke="black" stroke-width="1.5"/>"#
            );
        }
        text = format!("{text} ({} to {})", figure(least), figure(most));
    }
    for (mark, colour) in [(row.floor, FLOOR), (row.aim, AIM)] {
        if let Some(mark) = mark {
            let (x, top, height) = (axis.x(mark) - 1.5, middle - ROW_HEIGHT / 2.0 + 2.0, ROW_HEIGHT - 4.0);
            put!(out, r#"<rect x="{x:.1}" y="{top:.1}" width="3" height="{height}" fill="{colour}"/>"#);
        }
    }
    put!(out, r#"<text x="{text_x}" y="{baseline:.1}">{}</text>"#, escaped(&text));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(group: &str, label: &str, value: Option<f64>) -> Row {
        let (least, most) = (value.map(|value| value * 0.9), value.map(|value| value * 1.1));
        Row { group: group.into(), label: label.into(), value, least, most, floor: Some(4.0), aim: Some(2.5) }
    }

    fn example() -> Plot {
        let rows = vec![
            row("WRITE", "WRITE 8 B & \"more\" <b>", Some(3.0)),
            row("WRITE", "WRITE 64 B", Some(4.5)),
            row("SEND", "SEND 64 B", None),
        ];
        Plot { title: "Small messages, one way".into(), axis: "times the limit".into(), rows }
    }

    /// Every element is closed by its own name or by itself, quotes pair up, and no stray sign is
    /// left in the text. Gives the texts between tags.
    fn well_formed(svg: &str) -> Vec<String> {
        let (mut open, mut texts, mut rest) = (Vec::new(), Vec::new(), svg);
        while let Some(begin) = rest.find('<') {
            let text = &rest[..begin];
            assert!(
                !text.contains('>')
                    && !text
                        .replace("&amp;", "")
                        .replace("&lt;", "")
                        .replace("&gt;", "")
                        .replace("&quot;", "")
                        .contains('&')
            );
            texts.push(text.trim().to_owned());
            let end = begin + rest[begin..].find('>').expect("a tag ends");
            let tag = &rest[begin + 1..end];
            assert!(tag.matches('"').count().is_multiple_of(2) && !tag.contains('<'), "{tag}");
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop().as_deref(), Some(name));
            } else if !tag.ends_with('/') {
                open.push(tag.split(' ').next().unwrap_or_default().to_owned());
            }
            for attribute in tag.trim_end_matches('/').split('"').step_by(2).filter(|name| name.contains('=')) {
                assert!(attribute.ends_with('='), "{attribute}");
            }
            rest = &rest[end + 1..];
        }
        assert!(open.is_empty() && rest.trim().is_empty());
        texts
    }

    #[test]
    fn a_plot_is_well_formed_and_has_every_row() {
        for rows in [3, 1, 0] {
            let mut plot = example();
            plot.rows.truncate(rows);
            let svg = plot.to_svg();
            let texts = well_formed(&svg);
            assert!(svg.starts_with("<svg ") && !svg.contains("NaN") && !svg.contains("inf"));
            for row in &plot.rows {
                assert!(texts.contains(&escaped(&row.label)), "{} in {texts:?}", row.label);
            }
            assert_eq!(texts.contains(&"failed".to_owned()), rows == 3);
            assert_eq!(svg.matches(&format!("height=\"22\" fill=\"{FLOOR}\"")).count(), rows.min(2));
        }
    }

    #[test]
    fn values_far_apart_make_a_logarithmic_axis() {
        let mut plot = example();
        assert!(!plot.to_svg().contains("logarithmic"));
        plot.rows[0].value = Some(400.0);
        let svg = plot.to_svg();
        assert!(svg.contains("times the limit, logarithmic"));
        well_formed(&svg);
        let axis = Axis::of(&plot.rows);
        assert!(axis.x(2.5) > axis.left && axis.x(400.0) <= axis.left + PLOT_WIDTH && axis.x(4.0) > axis.x(2.5));
        assert!(axis.ticks().len() > 3);
    }

    #[test]
    fn names_of_files() {
        assert_eq!(example().file_name(), "small-messages-one-way.svg");
    }
}
