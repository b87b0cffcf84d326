//! Published numbers against those of this host.

use super::answers::{Answer, median_of};
use crate::matrix::{Matrix, Role, program};
use crate::model::{Cell, Published};
use crate::stats::{MATTERS, SINGLE_ROUND_NOISE, median};

/// The cells that a published number speaks of.
fn spoken_of<'a>(matrix: &Matrix<'a>, number: &Published) -> Vec<&'a Cell> {
    let fits = |cell: &Cell| {
        number.axes.iter().all(|(axis, value)| cell.axis(axis) == Some(value.as_str()))
    };
    matrix.run.cells.iter().filter(|cell| fits(cell)).collect()
}

/// What stands beside a published number: the median of the cells that it speaks of. Of several
/// programs, our own.
pub(crate) fn measured_for(matrix: &Matrix<'_>, number: &Published) -> Option<f64> {
    let own = spoken_of(matrix, number).into_iter().filter(|cell| matrix.counts(cell));
    median(&own.filter_map(|cell| median_of(cell, &number.metric)).collect::<Vec<f64>>())
}

/// The same of the other programs, by name.
pub(crate) fn others_for(matrix: &Matrix<'_>, number: &Published) -> Vec<(String, f64)> {
    let mut found: Vec<(String, Vec<f64>)> = Vec::new();
    for cell in spoken_of(matrix, number) {
        let (_, name) = program(&cell.axes);
        let (Some(name), Some(value)) = (name, median_of(cell, &number.metric)) else { continue };
        if matrix.counts(cell) {
            continue;
        }
        match found.iter_mut().find(|(known, _)| *known == name) {
            Some((_, values)) => values.push(value),
            None => found.push((name, vec![value])),
        }
    }
    found.into_iter().filter_map(|(name, values)| Some((name, median(&values)?))).collect()
}

/// Whether two numbers differ by no more than a part of the larger one.
fn near(one: f64, two: f64, part: f64) -> bool {
    (one - two).abs() <= part * one.abs().max(two.abs())
}

/// Whether the order of published numbers is the one of this host.
pub(super) fn of_published(matrix: &Matrix<'_>) -> Option<Answer> {
    let both: Vec<(&Published, f64)> = matrix
        .run
        .published
        .iter()
        .filter_map(|number| Some((number, measured_for(matrix, number)?)))
        .collect();
    let rounds = matrix.run.cells.iter().map(|cell| cell.samples.len()).max().unwrap_or(0);
    let noise = if rounds < 3 { SINGLE_ROUND_NOISE } else { MATTERS };
    let (mut pairs, mut agree, mut ties) = (0, 0, 0);
    for (i, (one, own)) in both.iter().enumerate() {
        for (two, other) in &both[i + 1..] {
            // Numbers under different loads have no order.
            let loads = [one, two].map(|number| matrix.part(&number.axes, Role::Condition));
            if one.metric != two.metric
                || loads[0] != loads[1]
                || near(one.value, two.value, MATTERS)
            {
                continue;
            }
            if near(*own, *other, noise) {
                ties += 1;
                continue;
            }
            pairs += 1;
            agree += u32::from((one.value > two.value) == (own > other));
        }
    }
    let sentence = said(agree, pairs, ties)?;
    Some(Answer { question: "Do the published numbers hold here?".to_owned(), sentence })
}

/// So many of these pairs rank as they did; others tie here.
fn said(agree: u32, pairs: u32, ties: u32) -> Option<String> {
    let mut text = match (agree, pairs) {
        (_, 0) if ties == 0 => return None,
        (_, 0) => return Some("What differed there cannot be told apart here.".to_owned()),
        (0, 1) => "No: the one pair that can be compared ranks the other way round".to_owned(),
        (_, 1) => "Yes: the one pair that can be compared ranks as it did".to_owned(),
        _ => {
            let part = f64::from(agree) / f64::from(pairs);
            let verdict = match part {
                part if part >= 0.9 => "The order is the same here",
                part if part >= 0.6 => "The order is much the same here",
                part if part > 0.4 => "Here the order has little to do with it",
                _ => "Here it is rather the other way round",
            };
            format!("{verdict}: {agree} of {pairs} pairs rank as they did")
        }
    };
    match ties {
        0 => {}
        1 => text.push_str("; one more pair cannot be told apart here"),
        more => text.push_str(&format!("; {more} more pairs cannot be told apart here")),
    }
    text.push('.');
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_told_in_words() {
        let words = |agree, pairs, ties| said(agree, pairs, ties).unwrap_or_default();
        assert_eq!(words(0, 0, 0), "");
        assert_eq!(words(0, 0, 2), "What differed there cannot be told apart here.");
        assert!(words(0, 1, 0).starts_with("No: the one pair"));
        assert!(words(1, 1, 1).ends_with("as it did; one more pair cannot be told apart here."));
        assert_eq!(
            words(2, 3, 0),
            "The order is much the same here: 2 of 3 pairs rank as they did."
        );
    }

    #[test]
    fn nearness_is_a_part_of_the_larger() {
        assert!(near(100.0, 98.0, 0.02) && !near(100.0, 97.0, 0.02) && near(0.0, 0.0, 0.02));
    }
}
