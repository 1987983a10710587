//! Doorbells of a session: the queue pair or SRQ that each cookie of its library stands for.
//!
//! A library chooses its cookies. The table has pages, so that one object with a high cookie costs
//! a page and not the whole table.
use freeflow_engine::{QpId, SrqId};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DoorbellTarget {
    Qp(QpId),
    Srq(SrqId),
}

const PAGE_DOORBELL_COUNT: usize = 128;

struct Page {
    bells: [Option<DoorbellTarget>; PAGE_DOORBELL_COUNT],
    used_count: usize,
}

#[derive(Default)]
pub struct DoorbellTable {
    pages: Vec<Option<Box<Page>>>,
}

impl DoorbellTable {
    #[inline]
    pub fn get(&self, cookie: u32) -> Option<DoorbellTarget> {
        let at = cookie as usize;
        self.pages.get(at / PAGE_DOORBELL_COUNT)?.as_ref()?.bells[at % PAGE_DOORBELL_COUNT]
    }

    pub fn set(&mut self, cookie: u32, bell: Option<DoorbellTarget>) {
        let (page, at) = (cookie as usize / PAGE_DOORBELL_COUNT, cookie as usize % PAGE_DOORBELL_COUNT);
        if self.pages.len() <= page {
            if bell.is_none() {
                return;
            }
            self.pages.resize_with(page + 1, || None);
        }
        let place = &mut self.pages[page];
        if place.is_none() && bell.is_none() {
            return;
        }
        let table = place.get_or_insert_with(|| Box::new(Page { bells: [None; PAGE_DOORBELL_COUNT], used_count: 0 }));
        table.used_count += usize::from(bell.is_some());
        table.used_count -= usize::from(table.bells[at].is_some());
        table.bells[at] = bell;
        if table.used_count == 0 {
            *place = None;
        }
    }

    #[cfg(test)]
    fn page_count(&self) -> usize {
        self.pages.iter().flatten().count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use freeflow_engine::QpId;

    fn bell(index: u32) -> Option<DoorbellTarget> {
        Some(DoorbellTarget::Qp(QpId { index, generation: 1 }))
    }

    #[test]
    fn a_high_cookie_costs_a_page() {
        let mut bells = DoorbellTable::default();
        for cookie in [32_767, 5, 6, 200] {
            bells.set(cookie, bell(cookie));
        }
        assert_eq!(bells.page_count(), 3);
        assert_eq!([32_767, 5, 6, 200].map(|cookie| bells.get(cookie)), [32_767, 5, 6, 200].map(bell));
        assert_eq!([0, 7, 300, 32_766, 40_000].map(|cookie| bells.get(cookie)), [None; 5]);
        bells.set(5, bell(9));
        bells.set(6, None);
        assert_eq!((bells.get(5), bells.get(6), bells.page_count()), (bell(9), None, 3));
        for cookie in [32_767, 5, 200, 7, 32_768] {
            bells.set(cookie, None);
        }
        assert_eq!(bells.page_count(), 0);
    }
}
