//! Tables as plain text (the first column to the left, the others to the right) and as Markdown.
use std::fmt;

pub struct Table {
    title: String,
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new(title: impl Into<String>, header: &[&str]) -> Self {
        Self { title: title.into(), header: header.iter().map(|&cell| cell.to_owned()).collect(), rows: Vec::new() }
    }

    /// # Panics
    /// When the row has not one cell for each column.
    pub fn row(&mut self, cells: Vec<String>) {
        assert_eq!(cells.len(), self.header.len(), "a row of another width");
        self.rows.push(cells);
    }

    /// Under a heading of the third level.
    pub fn to_markdown(&self) -> String {
        let line = |cells: &[String]| {
            let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
            format!("| {} |\n", cells.join(" | "))
        };
        let rule: Vec<String> =
            (0..self.header.len()).map(|column| if column == 0 { "---" } else { "---:" }.into()).collect();
        let rows: String = self.rows.iter().map(|row| line(row)).collect();
        format!("### {}\n{}{}{rows}", self.title, line(&self.header), line(&rule))
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.chain([self.header[column].chars().count()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.header.len()).map(width).collect();
        writeln!(f, "\n{}", self.title)?;
        for row in std::iter::once(&self.header).chain(&self.rows) {
            let mut line = String::new();
            for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                if column == 0 {
                    line.push_str(&format!("  {cell:<width$}"));
                } else {
                    line.push_str(&format!("  {cell:>width$}"));
                }
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// Three significant figures, as people read them.
pub fn figure(value: f64) -> String {
    match value.abs() {
        size if !size.is_finite() => "-".to_owned(),
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 || size == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// A size in bytes as the tables show it.
pub fn bytes(count: usize) -> String {
    match count {
        count if count >= 1 << 20 && count % (1 << 20) == 0 => format!("{} MB", count >> 20),
        count if count >= 1 << 10 && count % (1 << 10) == 0 => format!("{} KB", count >> 10),
        count => format!("{count} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new("title", &["name", "value"]);
        assert!(table.is_empty());
        table.row(vec!["a".into(), "1".into()]);
        table.row(vec!["longer".into(), "1000000".into()]);
        assert_eq!(table.to_string(), "\ntitle\n  name      value\n  a             1\n  longer  1000000\n");
    }

    #[test]
    fn markdown_has_a_heading_a_rule_and_whole_cells() {
        let mut table = Table::new("title", &["name", "value"]);
        table.row(vec!["a|b".into(), "1".into()]);
        assert_eq!(table.to_markdown(), "### title\n| name | value |\n| --- | ---: |\n| a\\|b | 1 |\n");
    }

    #[test]
    fn figures_and_sizes() {
        assert_eq!(figure(1234.4), "1234");
        assert_eq!(figure(12.34), "12.3");
        assert_eq!(figure(1.234), "1.23");
        assert_eq!(figure(0.1234), "0.123");
        assert_eq!(figure(0.0), "0.00");
        assert_eq!(figure(f64::NAN), "-");
        assert_eq!(bytes(64), "64 B");
        assert_eq!(bytes(65536), "64 KB");
        assert_eq!(bytes(1 << 20), "1 MB");
        assert_eq!(bytes(1025), "1025 B");
    }
}
